"""parts/old_runs.py: the plumbing of the trainers that have not moved to `Run` yet; leaves with it.

Functions are killed one system call at a time, so that no gap between two of them goes untried.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import common
from common import UserError
from parts import files, old_runs
from test_runs import every_kill
from tiny import tiny_model, tiny_reward_model, tiny_tokenizer, write_rows

if sys.platform != "linux":
    pytest.skip("forks and signals as on Linux", allow_module_level=True)


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("--pairs", nargs="+", default=["data/prefs.jsonl"])
    made.add_argument("--model", default="base")
    made.add_argument("--loss-type", choices=("sigmoid", "ipo"), default="sigmoid")
    old_runs.add_run_arguments(made, "runs/x", "1e-4")
    return made


def arguments(*argv):
    return old_runs.parse_with_config(parser(), [str(a) for a in argv])


# ---- schedule and optimiser ----


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", [0.5, 1] + [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]),
    ],
)
def test_schedule_by_hand(schedule, expected):
    """10 steps with a warm-up of .2: half the rate, the rate, then down from the full rate over 8 steps.

    The first step never has rate 0, each group keeps its own base rate, and what is logged is the optimiser's.
    """
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": [a], "base_lr": 1e-3}, {"params": [b], "base_lr": 1e-5}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    args = SimpleNamespace(warmup=0.2, schedule=schedule)
    for step, factor in enumerate(expected, 1):
        old_runs.set_lr(optimizer, args, step, 10)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * factor)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(1e-5 * factor)
        assert old_runs.step_row(optimizer, 2.0, False) == {"lr": optimizer.param_groups[0]["lr"], "grad_norm": 2.0, "skipped_steps": 0}  # fmt: skip
    old_runs.set_lr(optimizer, SimpleNamespace(warmup=0.0, schedule=schedule), 1, 1)
    assert optimizer.param_groups[0]["lr"] == 1e-3, "one step without warm-up is a whole one"


def test_no_decay_on_biases_norms_and_heads(tmp_path):
    """Decay pulls a norm's weight, which belongs at 1, to 0. Only matrices outside the head decay; a head has its own rate;
    each trained weight is in exactly one group, frozen ones in none.
    """
    model = common.load_reward_model(tiny_reward_model("gpt2", tmp_path), tiny_tokenizer())
    model.transformer.wpe.requires_grad_(False)
    optimizer = old_runs.make_optimizer(model, 1e-4, head_lr=1e-3, weight_decay=0.1, eps=1e-5)
    groups = {id(w): g for g in optimizer.param_groups for w in g["params"]}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(groups)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            assert id(weight) not in groups
            continue
        group, head = groups[id(weight)], name == "score.weight"
        assert group["lr"] == group["base_lr"] == (1e-3 if head else 1e-4), name
        decays = weight.ndim == 2 and not head
        assert group["weight_decay"] == (0.1 if decays else 0.0), name
        assert group["eps"] == 1e-5
    assert {g["lr"] for g in old_runs.make_optimizer(model, 1e-4).param_groups} == {1e-4}


# ---- arguments ----


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--batch-size", 0], "--batch-size 0: expected at least 1"),
        (["--steps", 0], "--steps 0"),
        (["--max-length", 1], "--max-length 1"),
        (["--lora-rank", -1], "--lora-rank -1"),
        (["--lr", 0], "--lr 0.0: expected a number above 0"),
        (["--lr", "nan"], "--lr nan"),
        (["--weight-decay", "inf"], "--weight-decay inf"),
        (["--max-grad-norm", "-1"], "--max-grad-norm -1.0"),
        (["--warmup", "1.5"], r"--warmup 1.5: expected a share in \[0, 1\)"),
        (["--seed", -3], "--seed -3"),
        (["--seed", 2**63], "--seed 9223372036854775808: expected less than"),
        (["--save-every", 0], "--save-every 0"),
        (["--resume", "--overwrite"], "--resume and --overwrite"),
    ],
)
def test_arguments_out_of_range(argv, message):
    """A rate of 0 or a batch of 0 fails hours later or never: one line before anything is loaded."""
    with pytest.raises(UserError, match=message):
        old_runs.check_arguments(arguments(*argv))


def test_unknown_flags_and_choices_are_one_line():
    """argparse prints forty lines of usage and exits by itself; here it is a UserError that names the flag."""
    for argv, message in ((["--lrr", 1], "--lrr"), (["--loss-type", "dro"], "sigmoid"), (["--steps", "x"], "--steps")):  # fmt: skip
        with pytest.raises(UserError, match=message) as caught:
            arguments(*argv)
        assert "\n" not in str(caught.value)


def test_an_earlier_args_json_is_a_layer_of_defaults(tmp_path):
    """`--config runs/a/args.json` repeats a run; flags on the line win, and what belongs to one session is not repeated."""
    first = arguments("--out", tmp_path / "a", "--lr", 3e-4, "--epochs", 2, "--pairs", "x.jsonl", "y.jsonl", "--grad-checkpoint", "--stop-after", 5, "--overwrite", "--loss-type", "ipo", "--warmup", 0, "--eval-every", 0)  # fmt: skip
    old_runs.open_run(first, old_runs.check_run(first, "dpo", []))
    file = tmp_path / "a" / "args.json"
    again = arguments("--config", file, "--out", tmp_path / "b", "--seed", 7)
    expected = {**vars(first), "out": str(tmp_path / "b"), "seed": 7, "config": str(file), "stop_after": None, "overwrite": False}  # fmt: skip
    assert vars(again) == expected
    assert arguments("--config", file, "--pairs", "z.jsonl").pairs == ["z.jsonl"]
    for content in ("[]", "{}", '{"args": 3, "sha256": {}}', "not json"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match="--config .*bad.json"):
            arguments("--config", tmp_path / "bad.json")
    with pytest.raises(UserError, match="--config .*none.json: no such file"):
        arguments("--config", tmp_path / "none.json")


def test_the_args_json_of_another_stage_is_refused(tmp_path):
    """sft's rate of 1e-3, taken over by dpo through --config, is three times its own and nobody typed it."""
    record = {"stage": "sft", "args": {"data": ["x.jsonl"], "lr": 1e-3}, "sha256": {}}
    (tmp_path / "sft.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="made by sft.py; --data is no flag here"):
        arguments("--config", tmp_path / "sft.json")


# ---- the run folder ----


@pytest.fixture
def run(tmp_path):
    """A finished run in tmp_path/run on one data file and a model folder: (argv, files, model)."""
    data = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    model = tiny_model("llama", tmp_path)
    argv = ["--out", tmp_path / "run", "--pairs", data, "--model", model, "--lr", 1e-4, "--steps", 6]  # fmt: skip
    args = arguments(*argv)
    old_runs.check_out(args, [model])
    old_runs.open_run(args, old_runs.check_run(args, "dpo", [data], model))
    return argv, [data], model


def resume(run, *flags, stage="dpo"):
    argv, files, model = run
    args = arguments(*argv, "--resume", *flags)
    old_runs.check_out(args, [model])
    record = old_runs.check_run(args, stage, files, model)
    old_runs.open_run(args, record)
    return record


@pytest.mark.parametrize("name", ["samples.jsonl", "rollouts.jsonl", "checkpoint/pairs.jsonl"])
def test_an_input_under_the_name_of_a_log_is_refused(name, run, tmp_path):
    """`--pairs runs/x/samples.jsonl --out runs/x --overwrite`: --overwrite deletes the file, --resume would write samples into
    it. It is refused by its name and lies there as before; a file of another name in --out is no matter."""
    argv, _, model = run
    inside = tmp_path / "run" / name
    data = write_rows(inside, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for flag in ("--overwrite", "--resume"):
        args = arguments(*argv, flag)
        old_runs.check_out(args, [model])
        with pytest.raises(UserError, match=f"{name}: an input that lies in --out .*another --out"):
            old_runs.check_run(args, "dpo", [None, data], model)
    other = write_rows(tmp_path / "run" / "mine.jsonl", [{"prompt": "a"}])
    args = arguments(*argv, "--overwrite")
    old_runs.open_run(args, old_runs.check_run(args, "dpo", [other], model))
    assert Path(other).is_file()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--seed", 1], "--seed was 0, is 1"),
        (["--lr", 2e-4], "--lr was 0.0001, is 0.0002"),
        (["--batch-size", 16], "--batch-size was 32, is 16"),
        (["--loss-type", "ipo"], "--loss-type was 'sigmoid', is 'ipo'"),
        (["--schedule", "linear"], "--schedule was 'cosine', is 'linear'"),
        (["--model", "other"], "--model was"),
        (["--pairs", "other.jsonl"], "--pairs was"),
        (["--steps", 5], "--steps was 6, is 5"),
        (
            ["--seed", 1, "--lora-rank", 4],
            "--seed was 0, is 1; --lora-rank|--lora-rank was 0, is 4; --seed",
        ),  # fmt: skip
    ],
)
def test_resume_refuses_another_run_by_name(run, flags, message):
    """Resumed with another seed or rate, a run silently becomes one that nobody can repeat: what differs is named."""
    before = (Path(run[0][1]) / "args.json").read_bytes()
    with pytest.raises(UserError, match="--resume: this is not the run in") as caught:
        resume(run, *flags)
    import re

    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)
    assert (Path(run[0][1]) / "args.json").read_bytes() == before


def test_resume_refuses_changed_data_and_weights(run, tmp_path):
    """The same names with other contents: one byte of the data, one weight of the model, another stage."""
    argv, (data,), model = run
    resume(run)
    with pytest.raises(UserError, match="it was made by dpo.py"):
        resume(run, stage="reward_train")
    text = Path(data).read_text()
    Path(data).write_text(text.replace('"b"', '"B"'))
    with pytest.raises(UserError, match=r"pairs\.jsonl has changed"):
        resume(run)
    Path(data).write_text(text)
    weights = Path(model) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="the weights of --model have changed"):
        resume(run)


def test_resume_allows_what_changes_no_weight(run):
    """How often to save, evaluate or keep, and a longer plan, are the user's to change; the rest of args.json stays."""
    file = Path(run[0][1]) / "args.json"
    before = json.loads(file.read_text())
    resume(run, "--save-every", 3, "--eval-every", 0, "--keep", 5, "--steps", 60, "--stop-after", 9)
    after = json.loads(file.read_text())
    changed = {k for k, v in after["args"].items() if before["args"][k] != v}
    assert changed <= {"save_every", "eval_every", "keep", "steps", "stop_after", "resume"}
    assert {k: after[k] for k in ("stage", "sha256", "model_sha256")} == {k: before[k] for k in ("stage", "sha256", "model_sha256")}  # fmt: skip
    assert before["stage"] == "dpo" and before["args"]["lr"] == 1e-4
    assert {"python", "torch", "transformers"} <= before["versions"].keys()
    assert all(len(h) == 64 for h in [*before["sha256"].values(), before["model_sha256"]])


def test_resume_where_there_is_no_run(tmp_path, run):
    """`--resume` into an empty folder must not start from nothing under the name of going on."""
    with pytest.raises(UserError, match="--resume: .*no args.json"):
        old_runs.check_out(arguments("--out", tmp_path / "none", "--resume"))
    args = arguments(*run[0], "--resume")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with pytest.raises(UserError, match="checkpoint is gone"):
        old_runs.load_checkpoint(args, {}, {})


def test_a_folder_in_use_is_refused_and_untouched(run, tmp_path):
    """Without a flag nothing of a run is touched: neither its log nor its weights, nor the input it would overwrite."""
    argv, _, model = run
    content = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="holds a run; pass --resume to go on, --overwrite"):
        old_runs.check_out(arguments(*argv), [model])
    for flags in ([], ["--overwrite"], ["--resume"]):
        with pytest.raises(UserError, match="this is the folder of an input"):
            old_runs.check_out(arguments("--out", model, *flags), [model])
        with pytest.raises(UserError, match="is a file"):
            old_runs.check_out(arguments("--out", Path(model) / "config.json" / "x", *flags))
    assert content == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_overwrite_removes_the_run_and_nothing_else(run, tmp_path):
    """--overwrite on `--out .` must not be `rm -r`: of a folder with a run and a user's own files exactly the run goes."""
    out = tmp_path / "run"
    ours = ["metrics.jsonl", "samples.jsonl", "model.safetensors", "config.json", "generation_config.json"]  # fmt: skip
    for name in ours:
        (out / name).write_text("old")
    (out / "checkpoint" / "step-0000003").mkdir()
    (out / "adapter").mkdir()
    mine = ["notes.txt", "thesis/chapter.tex", "report.json", "data.jsonl", "model.safetensors.bak", ".env", ".git/config"]  # fmt: skip
    for name in mine:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    args = arguments(*run[0], "--overwrite", "--seed", 5)
    old_runs.check_out(args, [run[2]])
    old_runs.open_run(args, old_runs.check_run(args, "dpo", run[1], run[2]))
    assert all((out / name).read_text() == "mine" for name in mine)
    left = {p.name for p in out.iterdir()} - {Path(m).parts[0] for m in mine}
    assert left == {"args.json", "checkpoint"} and not list((out / "checkpoint").iterdir())
    assert json.loads((out / "args.json").read_text())["args"]["seed"] == 5


def test_overwrite_removes_the_old_tokenizer(run, tmp_path):
    """A model without a chat template over a run that had one: the old file stayed, and with it the wrong template."""
    files = [
        "tokenizer.json",
        "chat_template.jinja",
        "special_tokens_map.json",
        "added_tokens.json",
    ]
    for name in [*files, "mine.txt"]:
        (tmp_path / "run" / name).write_text("{}")
    (tmp_path / "run" / "additional_chat_templates").mkdir()
    args = arguments(*run[0], "--overwrite")
    old_runs.open_run(args, old_runs.check_run(args, "dpo", run[1], run[2]))
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert left == {"args.json", "checkpoint", "mine.txt"}


def test_an_empty_name_is_no_folder():
    """`--out "$OUT"` with OUT unset: Path("") is the working folder, and a model would be written among the scripts."""
    with pytest.raises(UserError, match='--out "": expected the name of a folder'):
        old_runs.check_out(arguments("--out", ""))


def test_overwrite_spares_a_model_that_is_no_run(tmp_path):
    """`--out my-model --overwrite` with a mistyped name would delete weights that no run of ours made: without an args.json
    the folder is somebody's own, and refused. A folder in which we were killed before args.json is ours.
    """
    model = Path(tiny_model("gpt2", tmp_path))
    content = {p.name: p.read_bytes() for p in model.iterdir()}
    with pytest.raises(UserError, match="no args.json.*--overwrite would delete it"):
        old_runs.check_out(arguments("--out", model, "--overwrite"))
    assert content == {p.name: p.read_bytes() for p in model.iterdir()}
    (tmp_path / "killed" / "checkpoint").mkdir(parents=True)
    args = arguments("--out", tmp_path / "killed", "--overwrite")
    old_runs.check_out(args)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    old_runs.check_out(arguments("--out", tmp_path / "notes"))


# ---- logs ----


def test_a_log_is_cut_back_to_the_checkpoint(tmp_path):
    """Rows behind the checkpoint would stand twice in the log, and a line torn by a kill would break every reader.

    Resumed at step 2: the rows of 0, 1, 2 and the evaluation at 2 stay; 3 and the torn 4 go, and so does garbage.
    """
    log = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "loss": 1 / (s + 1)} for s in (0, 1, 2)] + [{"step": 2, "eval/loss": 0.5}, {"step": 3}]  # fmt: skip
    whole = "".join(json.dumps(r) + "\n" for r in rows).encode()
    for tail in (b"", b'{"step": 4, "lo', b'{"step": 2}', b"\x00\x00\x00", b'\xff{"step": 1}\n'):
        log.write_bytes(whole + tail)
        old_runs.cut_log(log, 2)
        assert list(files.read_jsonl(log)) == rows[:4]
        files.write_jsonl(log, [{"step": 3}], append=True)
        assert list(files.read_jsonl(log))[-1] == {"step": 3}
    old_runs.cut_log(log, -1)
    assert log.read_bytes() == b""
    old_runs.cut_log(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("end", ["finish", "stopped"])
def test_wandb_hears_that_a_run_is_over(end, tmp_path, monkeypatch):
    """wandb ends a run in a hook of Python's own end, which a process under torchrun leaves out (`files.command`): said by name."""
    calls = []
    run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    args = SimpleNamespace(out=str(tmp_path), wandb_project="mine", wandb_name=None, resume=False)
    log = old_runs.MetricsLog(args, 0)
    log.write({"step": 1, "loss": 0.5})
    assert not calls
    log.finish(["loss"]) if end == "finish" else log.stopped(1, None)
    assert calls == ["finish"]


def test_metrics_rows_are_written_at_once(tmp_path, capsys):
    """A log that is flushed at the end shows nothing of the run that was killed; NaN is null; old rows stay on resume."""
    args = SimpleNamespace(out=str(tmp_path), wandb_project=None, resume=False)
    log = old_runs.MetricsLog(args, 0)
    log.write({"step": 1, "loss": math.nan, "tokens": 50})
    log.evaluation(1, {"eval/loss": 0.5, "none": None}, [{"prompt": "p", "answer": "a"}])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 1] and rows[0]["loss"] is None
    assert rows[0]["tokens_per_s"] > 0 and rows[0]["time_s"] >= 0 and rows[0]["peak_mem_mb"] > 10
    assert list(files.read_jsonl(tmp_path / "samples.jsonl")) == [{"step": 1, "prompt": "p", "answer": "a"}]  # fmt: skip
    log.write({"step": 2, "loss": 3.0})
    args.resume = True
    assert [r["step"] for r in old_runs.MetricsLog(args, 1).rows()] == [1, 1]
    assert "resumed at step 1" in capsys.readouterr().out
    args.resume = False
    assert old_runs.MetricsLog(args, 0).rows() == []


# ---- checkpoints ----


class Tiny(nn.Module):
    """A weight, a tied second name for it, a frozen one: what a checkpoint must and must not hold."""

    def __init__(self, value):
        super().__init__()
        self.a = nn.Parameter(torch.full((4, 3), float(value)))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)


def state_at(step):
    """Model and optimiser as they stand after `step` steps; all numbers depend on the step."""
    model = Tiny(step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=step / 100)
    model.a.grad = torch.full((4, 3), float(step))
    optimizer.step()
    model.a.data.fill_(step)
    return model, optimizer


def save(args, step, **extra):
    model, optimizer = state_at(step)
    old_runs.save_checkpoint(args, step, {"m": model}, {"m": optimizer}, None, **extra)


def loaded(args):
    """The step that is resumed from; the weights and moments must be exactly those of that step."""
    model = Tiny(-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    step = old_runs.load_checkpoint(args, {"m": model}, {"m": optimizer})
    if step:
        _, expected = state_at(step)
        assert (model.a == step).all()
        assert optimizer.param_groups[0]["lr"] == step / 100
        moment = expected.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moment)
    else:
        assert (model.a == -1).all()
    return step


@pytest.fixture
def args(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    return SimpleNamespace(out=str(tmp_path), keep=2, resume=True)


def names(args):
    return sorted(p.name for p in (Path(args.out) / "checkpoint").iterdir())


def test_the_last_checkpoints_are_kept_and_the_newest_is_loaded(args):
    """Steps are sorted as numbers: as text, step-9 is newer than step-10. `--keep 2` of 4 leaves 9 and 10."""
    assert loaded(args) == 0
    for step in (2, 8, 9, 10):
        save(args, step)
    assert names(args) == ["step-0000009", "step-0000010"]
    assert loaded(args) == 10
    args.resume = False
    assert loaded(args) == 0, "a new run does not look at old checkpoints"


def test_a_plan_that_ends_before_the_checkpoint_is_refused(args):
    """A run of `--epochs` resumed with `--steps 8` at its step 9 would end at once and call step 9's weights those of 8.

    A --stop-after that lies behind is over: the same command with --resume goes on, as the README says.
    """
    save(args, 9)
    args.steps, args.stop_after = 8, 5
    with pytest.raises(UserError, match="--steps 8: the run .* is at step 9 already"):
        loaded(args)
    args.steps = 9
    assert loaded(args) == 9


def test_a_checkpoint_is_the_whole_state(args):
    """What is not restored shows only in the weights of a resumed run: extra values and all three random generators."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.standard_normal()  # numpy keeps the second of a pair: it belongs to the state as well
    save(args, 4, cursor=17, kl=torch.tensor([0.25]))
    expected = (
        random.random(),
        np.random.standard_normal(),
        np.random.rand(),
        torch.rand(2).tolist(),
    )
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    model, optimizer, extra = *state_at(1), {}
    step = old_runs.load_checkpoint(args, {"m": model}, {"m": optimizer}, extra=extra)
    assert step == 4 and extra == {"cursor": 17, "kl": torch.tensor([0.25])}
    assert (random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(2).tolist()) == expected  # fmt: skip
    state = torch.load(Path(args.out) / "checkpoint/step-0000004/state.pt", weights_only=True)
    assert state["models"]["m"].keys() == {"a"}, "frozen weights are read from --model again"


def test_other_weights_are_refused(args):
    """A checkpoint of another architecture, loaded as far as it fits, is neither run."""
    save(args, 2)
    other = nn.Linear(2, 2)
    with pytest.raises(UserError, match="holds other weights than this model has"):
        old_runs.load_checkpoint(args, {"m": other}, {})


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "missing", "flipped", "text"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(args, damage, capsys):
    """A disk that filled up, a power cut: the older checkpoint is used, aloud, and the damaged one does not count for --keep."""
    save(args, 3)
    save(args, 6)
    file = Path(args.out) / "checkpoint/step-0000006/state.pt"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        flipped = bytearray(content)
        flipped[:40] = b"\xff" * 40
        flipped[-40:] = b"\xff" * 40
        damaged = {"truncated": content[: len(content) // 2], "empty": b"", "garbage": b"\x80\x02x" * 100, "flipped": bytes(flipped), "text": b"{}"}  # fmt: skip
        file.write_bytes(damaged[damage])
    assert loaded(args) == 3
    assert "step-0000006 cannot be read" in capsys.readouterr().out
    save(args, 6)
    assert loaded(args) == 6 and {"step-0000003", "step-0000006"} <= set(names(args))
    file.write_bytes(b"")  # damaged once more: the name of the first wreck is taken
    assert loaded(args) == 3


def test_no_readable_checkpoint_is_an_error(args):
    """A silent start from step 0 would cut the log and write over the trained weights."""
    save(args, 3)
    (Path(args.out) / "checkpoint/step-0000003/state.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint in .*checkpoint can be read; pass --overwrite"):  # fmt: skip
        loaded(args)


class Bomb:
    """Unpickled, it writes a file: what any pickle from a stranger may do."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


def test_a_pickled_object_is_refused_and_never_run(args, tmp_path, monkeypatch):
    """`torch.load` without `weights_only` runs code from the file. The bomb stays cold, the older checkpoint is used."""
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    save(args, 3)
    folder = Path(args.out) / "checkpoint" / "step-0000005"
    folder.mkdir()
    state = torch.load(folder.parent / "step-0000003/state.pt", weights_only=True)
    torch.save({**state, "step": 5, "extra": Bomb()}, folder / "state.pt")
    assert loaded(args) == 3
    assert not (tmp_path / "exploded").exists()
    shutil.rmtree(folder.parent / "step-0000003")
    os.rename(folder.parent / "unreadable-step-0000005", folder)
    with pytest.raises(UserError, match="can be read"):
        loaded(args)
    assert not (tmp_path / "exploded").exists()


def test_a_kill_while_a_checkpoint_is_written(args):
    """At no instant may the newest thing that looks like a checkpoint be half of one.

    Steps 3 and 6 are there, 9 is written and 3 removed, killed at each of its disk operations: what loads is 6 or 9,
    whole; what the kill left behind is cleaned up by the next checkpoint, and two are kept.
    """
    home, seen = Path(args.out) / "checkpoint", Counter()

    def prepare():
        shutil.rmtree(home)
        home.mkdir()
        save(args, 3)
        save(args, 6)

    def check(lived):
        step = loaded(args)
        seen[step] += 1
        assert step == 9 if lived else step in (6, 9)
        assert not [n for n in names(args) if n.startswith("unreadable")]
        save(args, 12)
        expected = (
            ["step-0000009", "step-0000012"] if step == 9 else ["step-0000006", "step-0000012"]
        )
        assert names(args) == expected

    assert every_kill(lambda: save(args, 9), check, prepare) >= 8
    assert seen[6] >= 5 and seen[9] >= 2, "killed before and after the instant that counts"


def test_a_kill_while_the_same_step_is_written_again(args):
    """A resumed run may write a step that is there already; killed while replacing it, the step before must remain."""
    home = Path(args.out) / "checkpoint"

    def prepare():
        shutil.rmtree(home)
        home.mkdir()
        save(args, 3)
        save(args, 6)

    def check(lived):
        assert loaded(args) in ((6,) if lived else (3, 6))

    assert every_kill(lambda: save(args, 6), check, prepare) >= 8


def test_a_kill_while_a_run_is_opened_or_replaced(run, tmp_path):
    """Killed between the files of the old run that --overwrite removes: what is left can be replaced by the same command,
    and never looks like a run that can be resumed with the new arguments.
    """
    out = tmp_path / "run"
    new = [*run[0], "--seed", 5]

    def prepare():
        shutil.rmtree(out)
        args = arguments(*run[0])
        old_runs.open_run(args, old_runs.check_run(args, "dpo", run[1], run[2]))
        (out / "metrics.jsonl").write_text('{"step": 1}\n')
        (out / "model.safetensors").write_text("old")
        (out / "checkpoint" / "step-0000001").mkdir()

    def act():
        args = arguments(*new, "--overwrite")
        old_runs.check_out(args, [run[2]])
        old_runs.open_run(args, old_runs.check_run(args, "dpo", run[1], run[2]))

    def check(lived):
        args = arguments(*new, "--resume")
        replaced = json.loads((out / "args.json").read_text())["args"]["seed"] == 5
        assert replaced or not lived
        with nullcontext() if replaced else pytest.raises(UserError, match="--seed was 0, is 5"):
            old_runs.check_run(args, "dpo", run[1], run[2])
            assert not list((out / "checkpoint").iterdir()) and not (out / "metrics.jsonl").exists()
        act()
        assert {p.name for p in out.iterdir()} == {"args.json", "checkpoint"}

    assert every_kill(act, check, prepare) >= 5


# ---- stopping ----


def test_the_first_signal_waits_and_the_second_does_not(capfd):
    """Ctrl-C in the middle of a step must not lose the step; pressed again, the user means it."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = old_runs.StopSignal()
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert (
            stop and stop.number == signal.SIGTERM and "--resume goes on" in capfd.readouterr().err
        )
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_handlers_of_before_come_back():
    """A notebook calls main() and goes on: Ctrl-C must interrupt it again, however main() ended."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def main(fails):
        stop = old_runs.StopSignal()
        assert signal.getsignal(signal.SIGINT) is not before[0] and not stop
        if fails:
            raise UserError("a NaN")

    main(False)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    with suppress(UserError):
        main(True)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_checkpoint_is_due():
    """Every so many steps, at the last one, at --stop-after, and when a signal came; at no other step."""
    args = SimpleNamespace(save_every=4, stop_after=6)
    assert [s for s in range(1, 11) if old_runs.checkpoint_due(args, s, 10, False)] == [4, 6, 8, 10]
    assert old_runs.checkpoint_due(args, 3, 10, True)
