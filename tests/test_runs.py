"""parts/runs.py with a toy trainer on `Run`: step, log, checkpoint, resume, stop; its batches."""

import functools
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

import common
from parts import files, reward_models, runs
from parts.card import base_of, commands, write_card
from parts.card_sections import add_result, add_section
from parts.files import UserError
from parts.guard import write_summary
from tiny import (
    cases,
    error_of,
    printed,
    read_json,
    table,
    tiny_model,
    tiny_reward_model,
    words,
    write_rows,
)

if sys.platform != "linux":
    pytest.skip("forks and signals as on Linux", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("quiet_process")
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def arguments(*argv):
    parser = runs.Parser("toy.py --data mine.jsonl --out runs/toy", "A toy.")
    parser.add_argument("--data", nargs="+", default=["data/prefs.jsonl"])
    parser.add_argument("--model", default="base")
    parser.add_argument("--gold")
    parser.add_run_arguments("runs/toy", (1e-3, 1e-5, 1e-4))
    return parser.parse_args(words(*argv))


class Toy:
    def __init__(self, folder, model, tokenizer):
        self.out, self.model, self.tokenizer = folder / "run", model, tokenizer
        self.data = write_rows(folder / "rows.jsonl", [{"text": "a"}, {"text": "b"}])
        self.argv = ["--out", self.out, "--data", self.data, "--model", model]
        self.argv += words("--lr 1e-2 --batch-size 2 --steps 6 --save-every 1")

    def opened(self, *flags, stage="toy"):
        args = arguments(*self.argv, *flags)
        inputs = [args.model, *args.data]
        run = runs.Run(stage, args, inputs, ("loss", "nothing"), ("eval/loss", "val/gold"))
        return run, common.load_policy(args.model, run.dtype, run.device)

    def started(self, *flags, **state):
        run, model = self.opened(*flags)
        run.plan(8, "rows")
        run.state = {"model": model, **state}
        run.start(model, self.tokenizer, run.args.lr)
        return run, model

    def train(self, *flags, during=None):
        run, model = self.started(*flags, steps=[], last=torch.zeros(2))
        self.run = run
        if run.step == 0:
            run.evaluation({"eval/loss": 2.0, "val/gold": None}, [{"prompt": "p", "answer": "é 0"}])
        for step in run.steps():
            for part in (0.25, 0.75):  # two micro-batches
                run.backward(sum((w - step).square().mean() for w in model.parameters()) * part)
            if during:
                during(run, step)
            run.state["steps"].append(step)
            run.state["last"] = torch.tensor([step, 0.5])
            row = run.update(lambda step=step: f"file:{step}")
            run.log({"sum": sum(run.state["steps"]), **row, "tokens": 50})
            if run.evaluates(step):
                samples = [{"prompt": "p", "answer": f"é {step}"}]
                run.evaluation({"eval/loss": 1 / step}, samples)
        return run.finish("python evaluate.py")

    def rows(self, name="metrics"):
        return list(files.read_jsonl(self.out / f"{name}.jsonl"))

    def numbers(self):
        return [row["step"] for row in self.rows()]

    def record(self):
        return read_json(self.out / "args.json")

    def steps(self):
        return sorted(int(p.stem[-7:]) for p in (self.out / "checkpoint").glob("step-*"))

    def outcome(self):
        assert [*self.out.rglob(".*")] == [], "something is left behind"
        rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in self.rows()]
        return (self.out / "model.safetensors").read_bytes(), rows, self.rows("samples")

    def refuses(self, message, *flags, **how):
        before = contents(self.out.parent)
        assert re.search(message, error_of(lambda: self.opened(*flags, **how)))
        assert contents(self.out.parent) == before


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_model("gpt2", tmp_path_factory.mktemp("models"), n_layer=1)


@pytest.fixture
def toy(tmp_path, small, tokenizer):
    return Toy(tmp_path, small, tokenizer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small, tokenizer):
    toy = Toy(tmp_path_factory.mktemp("whole"), small, tokenizer)
    assert toy.train() == 0
    return toy.outcome()


def contents(folder):
    """{path: bytes, or None of a folder}."""
    return {p: p.read_bytes() if p.is_file() else None for p in Path(folder).rglob("*")}


def norm(model):
    """Of the gradient."""
    grads = [w.grad for w in model.parameters() if w.grad is not None]
    return sum(grad.square().sum() for grad in grads).sqrt().item()


def test_an_epoch_is_a_permutation_with_its_short_last_batch():
    batches = [common.batch_indices(10, 4, 0, step) for step in range(1, 10)]
    shapes = [(len(indices), epoch) for indices, epoch in batches]
    assert shapes == [(n, epoch) for epoch in range(3) for n in (4, 4, 2)]
    orders = [tuple(np.concatenate([b for b, _ in batches[i : i + 3]])) for i in (0, 3, 6)]
    assert len({*orders}) == 3 and all(sorted(order) == [*range(10)] for order in orders)
    assert tuple(common.batch_indices(10, 4, 1, 1)[0]) != orders[0][:4], "another seed"
    assert common.batch_indices(10, 4, 0, 3, keep_order=True)[0].tolist() == [8, 9]
    assert common.batch_indices(3, 8, 0, 5)[1] == 4, "a batch larger than the data: an epoch a step"


def test_micro_batches_cut_but_never_reshape():
    """18 tokens per forward: 30 | 9, 8 (2·9 = 18) | 3, 2, 2."""
    lengths = np.array([9, 2, 3, 8, 30, 2, 99])
    parts = common.micro_batches([0, 1, 2, 3, 4, 5], lengths, 18)
    assert [p.tolist() for p in parts] == [[4], [0, 3], [2, 1, 5]]
    assert common.micro_batches([3, 1], [5, 5, 5, 5], 1)[0].tolist() == [3], "ties keep their order"
    assert common.micro_batches([], lengths, 18) == []


@cases("""
flags | rows | steps
 | 10 | 24
 | 11 | 24
 | 98 | 25
--epochs 2 | 10 | 6
--steps 5 | 10 | 5
""")
def test_the_plan(flags, rows, steps, capsys):
    """Without flags: whole passes that make 24 steps."""
    run = SimpleNamespace(args=arguments("--batch-size 4", flags))
    runs.Run.plan(run, rows, "rows")
    assert run.planned == steps
    plan = f"{rows} rows in batches of 4; steps per epoch {math.ceil(rows / 4)}, in total {steps}"
    assert plan in capsys.readouterr().out


def test_the_rate():
    """By size and LoRA, and its schedule: 2 of 10 steps rise, 8 fall."""
    small, large = (SimpleNamespace(num_parameters=lambda n=n: n) for n in (10**7, 10**8))
    adapted = SimpleNamespace(**vars(small), lora_config={})
    assert [runs.default_lr(m, (1, 2, 3)) for m in (small, large, adapted)] == [1, 2, 3]
    for schedule, falling in (
        ("constant", lambda done: 1),
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
    ):
        factors = [runs.lr_factor(step, 10, 0.2, schedule) for step in range(1, 11)]
        assert factors == pytest.approx([0.5, 1, *(falling(i / 8) for i in range(8))])
        assert runs.lr_factor(1, 1, 0.0, schedule) == 1, "one step without warm-up is a whole one"


def test_one_optimiser_over_several_modules(toy, tmp_path, capsys):
    """Each clipped on its own: clipping the first alone would leave PPO's critic with gradients of
    any size."""
    run, policy = toy.opened("--schedule linear --warmup 0.34")
    critic = tiny_reward_model("gpt2", tmp_path, n_layer=1)
    critic = reward_models.load_reward_model(critic, toy.tokenizer)
    frozen = critic.transformer.wpe.requires_grad_(False).weight
    run.plan(8, "rows")
    run.state = {"policy": policy, "kl": 0.1, "critic": critic}
    run.start(policy, toy.tokenizer, 1e-4, {critic.score: 1e-3})
    assert run.model is policy and policy.training and critic.training
    weights = {*policy.parameters(), *critic.parameters()}
    rates = dict.fromkeys(weights - {frozen}, 1e-4) | dict.fromkeys(critic.score.parameters(), 1e-3)
    groups = run.optimizer.param_groups
    assert {w: group["base_lr"] for group in groups for w in group["params"]} == rates
    assert sum(len(group["params"]) for group in groups) == len(rates)
    assert {group["weight_decay"] for group in groups} == {0}
    total, trained = (sum(w.numel() for w in some) / 1e6 for some in (weights, rates))
    assert f"{trained:.2f} M of {total:.2f} M weights are trained" in capsys.readouterr().out
    run.step, norms = 5, []  # of 6, the first 3 of which rise: two thirds of the rate are left
    run.optimizer.register_step_pre_hook(lambda *_: norms.extend(map(norm, (policy, critic))))
    run.backward(100 * sum(w.sum() for w in weights))
    assert run.update(str)["lr"] == pytest.approx(2e-4 / 3)
    assert sorted(group["lr"] for group in groups) == pytest.approx([2e-4 / 3, 2e-3 / 3])
    assert norms == pytest.approx([1, 1], abs=1e-4)


def test_the_loss_is_summed_and_the_gradient_clipped(toy):
    """Logged are the sum of two micro-batches and the norm before clipping (AdamW hides scale)."""
    run, model = toy.started("--schedule constant --warmup 0")
    run.step, twin, seen = 1, common.load_policy(toy.model), []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append(norm(model)))
    for part in (0.25, 0.75):
        run.backward(sum((w - 3).square().sum() for w in model.parameters()) * part)
    row, loss = run.update(str), sum((w - 3).square().sum() for w in twin.parameters())
    loss.backward()
    want = {"loss": loss.item(), "lr": 1e-2, "grad_norm": norm(twin), "skipped_steps": 0}
    assert row == pytest.approx(want, rel=1e-6) and row["grad_norm"] > 1
    assert seen == [pytest.approx(1, abs=1e-4)]
    assert run.loss == 0 and all(w.grad is None for w in model.parameters())


def test_what_is_not_finite_stops_the_run(toy):
    """NaN in one batch is NaN in all weights: stopped in front of the update, the rows named."""

    def interfere(kind, run, step):
        if kind == "loss" and step == 3:
            run.backward(next(run.model.parameters()).sum() * math.nan)
        if kind == "gradient":
            next(run.model.parameters()).grad[0, 0] = math.inf
        if kind == "weights" and step == 6:
            run.model.transformer.wte.weight.data[0, 0] = math.nan
            run.optimizer.zero_grad()
            run.backward(run.model.transformer.ln_f.weight.sum())

    for kind, message, logged in table("""
        loss | loss nan.* not finite; rows file:3. Lower --lr, or look at these | [0, 1, 2]
        gradient | gradient norm [infa]+: not finite; rows file:1 | [0]
        weights | --lr: the weights are no longer finite; lower it | [0, 1, 2, 3, 4, 5, 6, 6]
    """):
        with pytest.raises(UserError, match=message):
            toy.train("--overwrite", during=functools.partial(interfere, kind))
        assert toy.numbers() == logged and toy.steps() == sorted({*logged[1:]})[-2:]
    refused = error_of(common.load_policy, toy.out)
    assert "this run has not finished, so it holds no model yet" in refused


def test_a_foreign_args_json_or_a_broken_log_is_one_line(toy):
    """Each was a traceback at --resume."""
    toy.train("--stop-after 2")
    record, log = toy.out / "args.json", toy.out / "metrics.jsonl"
    torn = log.read_bytes().replace(b'{"step": 1', b"{step: 1", 1)
    for file, contents, message in (
        (record, b'{"stage": "to', "--resume: .*args.json: this is not the args.json of a run"),
        (record, b"[1, 2]", "--resume: .*args.json: .*expected an object with"),
        (record, b'{"args": {}, "sha256": "ab"}', '--resume: .*args.json: .*"sha256" is no object'),
        (log, torn, "metrics.jsonl:2: expected a"),
    ):
        before = file.read_bytes()
        file.write_bytes(contents)
        assert re.search(message, error_of(toy.train, "--resume"))
        file.write_bytes(before)
    assert toy.train("--resume") == 0


def test_an_fp16_overflow_skips_the_step(toy):
    """Steps 2 and 3 overflow and halve the scale; from 1024 the 11th in a row is no overflow. A loss
    that is infinite (it ended the run, though the next scale would have done) skips its step, too:
    in step 5 with its gradient, in step 6 alone: counted as skipped, it moved the weights."""
    scales, weights = [], []

    def overflow(*at, losses=()):
        def spoil(run, step):
            weight = next(run.model.parameters())
            if step in at:
                weight.grad[0, 0] = math.inf
            if step in losses:
                run.backward(losses[step](weight.sum()))
            weights.append(weight.detach().clone())
            scales.append(run.scaler.get_scale())

        return spoil

    flags, losses = (
        "--dtype fp16 --steps 7",
        {5: lambda x: x * math.inf, 6: lambda x: x * 0 + math.inf},
    )
    assert toy.train(flags, "--stop-after 4", during=overflow(2, 3)) == 0
    assert toy.train(flags, "--resume", during=overflow(losses=losses)) == 0
    rows = [row for row in toy.rows() if "lr" in row]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 0, 1, 1, 0]
    assert scales == [2.0**n for n in (10, 10, 9, 8, 8, 7, 7)]
    assert [torch.equal(*pair) for pair in itertools.pairwise(weights)] == [0, 1, 1, 0, 1, 1]
    finite = [row["loss"] for row in rows if row["loss"] is not None]
    assert len(finite) == 5 and max(finite) < 1000, "what is logged is not scaled"
    flags = "--dtype fp16 --overwrite --steps 20 --save-every 50"
    assert toy.train(flags, during=overflow(*range(2, 12))) == 0
    with pytest.raises(UserError, match="gradient norm (inf|nan): not finite; rows file:12"):
        toy.train(flags, during=overflow(*range(2, 13)))


def test_a_folder_that_may_not_be_used_is_untouched(toy, tmp_path):
    """A mistyped `--out my-model --overwrite` would delete a model that no run of ours made."""
    toy.train("--stop-after 1")
    model, mine, notes = (tmp_path / name for name in ("model", "mine", "notes"))
    for folder in (model, mine):
        shutil.copytree(toy.model, folder)
    inside = write_rows(model / "rows.jsonl", [{"text": "a"}])
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    toy.refuses("holds a run; pass --resume .* --overwrite .*another --out")
    toy.refuses("--resume .*, --overwrite .*; pass one of them", "--resume --overwrite")
    toy.refuses("notes holds no run with a checkpoint/", "--out", notes, "--resume")
    for how in ("", "--overwrite", "--resume"):
        toy.refuses(f"contains the input {model}; choose", "--out", model, "--model", model, how)
        data = ("--out", model, "--model hub/name --data", inside)
        toy.refuses(f"it contains the input {inside}", *data, how)
        toy.refuses("holds config.json but no args.json", "--out", mine, how)
    (mine / "args.json").write_text('{"output_dir": "output"}')  # of ms-swift
    toy.refuses("holds another tool's args.json, so it is not a run", "--out", mine, "--overwrite")
    toy.opened("--out", notes, "--overwrite")
    assert [p.name for p in notes.iterdir()] == ["notes.txt"]


def test_overwrite_removes_the_run_and_nothing_else(toy):
    toy.train()
    old = "adapter/old checkpoint/old added_tokens.json merges.txt rollouts.jsonl"
    mine = "notes.txt thesis/chapter.tex report.json data.jsonl .env .git/config".split()
    for name in [*old.split(), "additional_chat_templates/old.jinja", *mine]:
        (toy.out / name).parent.mkdir(exist_ok=True)
        (toy.out / name).write_text("mine")
    seen = []
    watch = lambda run, step: seen.append(contents(toy.out))  # noqa: E731
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (toy.out / name).write_text("of a run that wrote shards")
    assert toy.train("--overwrite --seed 5", during=watch) == 0
    assert all((toy.out / name).read_text() == "mine" for name in mine)
    now = {str(p.relative_to(toy.out)) for p, data in seen[0].items() if data is not None}
    new = {"args.json", "metrics.jsonl", "samples.jsonl"}
    assert now == {*new, *mine}, "as the first step found it: a model is written at the end"
    assert toy.record()["args"]["seed"] == 5 and toy.numbers() == [0, 1, 2, 3, 4, 5, 6, 6]


def test_resume_refuses_another_run_by_name(toy, tmp_path):
    model = Path(shutil.copytree(toy.model, tmp_path / "model"))
    toy.argv += ["--model", model]
    toy.train("--stop-after 1")
    for flags, message in {
        "--lr 2e-4": "--lr was 0.01, is 0.0002",
        "--gold g.py:f": "--gold was None, is 'g.py:f'",
        "--seed 1 --lora-rank 4": "(--seed was 0, is 1; )?--lora-rank was 0, is 4(; --seed|$)",
    }.items():
        toy.refuses(f"--resume: not the run in .*: {message}", "--resume", flags)
    toy.refuses("--resume: .*run was made by toy.py", "--resume", stage="reward_train")
    for file, name in ((Path(toy.data), "rows.jsonl"), (model / "model.safetensors", "model")):
        content = file.read_bytes()
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        toy.refuses(f"{name} has changed", "--resume")
        file.write_bytes(content)
    toy.opened("--resume")


def test_args_json_and_what_resume_may_change(toy, monkeypatch):
    """A machine's default of --micro-tokens changes the order of sums: what was left out stays."""
    toy.train("--stop-after 2")
    before = toy.record()
    assert before["stage"] == "toy" and {"torch", "numpy"} < before["versions"].keys()
    assert (before["args"]["lr"], before["args"]["micro_tokens"]) == (1e-2, 1024)
    assert before["sha256"] == {name: files.fingerprint(name) for name in (toy.data, toy.model)}
    toy.train("--resume --save-every 3 --eval-every 1 --stop-after 4 --steps 60")
    after = toy.record()
    changed = {k for k, v in after["args"].items() if before["args"][k] != v}
    assert changed == {"save_every", "eval_every", "steps", "stop_after", "resume"}
    assert {**before, "args": 0} == {**after, "args": 0}
    assert toy.steps() == [3, 4] and toy.numbers() == [0, 1, 2, 3, 3, 4, 4]
    assert toy.train("--resume") == 0, "back to the plan of before"
    for place in map(toy.argv.index, ("--lr", "--steps")):
        del toy.argv[place : place + 2]
    for how, expected in (("--resume", (1024, 1e-2, 6)), ("--overwrite", (None, None, None))):
        args = toy.opened(how)[0].args
        assert (args.micro_tokens, args.lr, args.steps) == expected


def test_a_resumed_run_is_the_run_in_one_go(toy, whole, capsys):
    assert toy.train("--stop-after 2") == 0
    assert "stopped after step 2 of 6" in capsys.readouterr().out
    for folder in (toy.out, toy.out / "checkpoint"):
        (folder / ".writing-half").write_text("left by a kill")
    for said in ("resumed at step 2", "resumed at step 6"):  # then only its end is repeated
        assert toy.train("--resume --stop-after 2") == 0, "already there: on to the end"
        assert said in capsys.readouterr().out and toy.outcome() == whole
        assert toy.run.state["steps"] == [1, 2, 3, 4, 5, 6]
        assert toy.run.state["last"].tolist() == [6, 0.5]
    for plan in ("--steps 8", ""):  # longer, then one that is behind it
        assert toy.train("--resume " + plan) == 0 and toy.numbers()[-1] == 8


@pytest.mark.parametrize("tail", [b'{"step": 2}', '{"step": 4, "answer": "é'.encode()[:-1]])
@pytest.mark.parametrize("last", [2, 0])
def test_a_log_is_cut_back_to_the_checkpoint(last, tail, toy, whole, capsys):
    """Rows behind the checkpoint would stand twice; a torn line, cut within é, breaks readers."""

    def kill(run, step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.train("--save-every 2 --eval-every 3", during=kill)
    assert toy.numbers() == [0, 1, 2, 3, 3, 4] and toy.steps() == [2, 4]
    for name in ("metrics", "samples"):
        with open(toy.out / f"{name}.jsonl", "ab") as file:
            file.write(tail)
    for step in toy.steps():
        if step > last:
            (toy.out / "checkpoint" / f"step-{step:07d}.pt").unlink()
    assert toy.train("--resume") == 0 and toy.outcome() == whole
    assert f"resumed at step {last}" in capsys.readouterr().out


def test_rows_are_written_at_once(toy, monkeypatch, capsys):

    def read(run, step):
        run.write("rollouts.jsonl", [{"step": step, "x": math.inf}])
        written.append((len(toy.rows()), toy.rows("rollouts")[-1]))

    written, wandb = [], Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for end in ("--stop-after 2", "--resume"):
        assert toy.train("--wandb-project mine", end, during=read) == 0
    calls = wandb.init.return_value.method_calls  # .log(row, step=…) and .finish()
    logged = [call.kwargs["step"] if call[0] == "log" else call[0] for call in calls]
    assert logged == [0, 1, 2, "finish", 3, 4, 5, 6, 6, "finish"]
    assert written == [(step, {"step": step, "x": None}) for step in range(1, 7)]
    first, second, *_ = toy.rows()
    assert (first["step"], first["eval/loss"], first["val/gold"]) == (0, 2.0, None)
    assert second["tokens_per_s"] > 0 and second["time_s"] >= 0 and second["peak_mem_mb"] > 10
    assert toy.rows("samples") == [{"step": s, "prompt": "p", "answer": f"é {s}"} for s in (0, 6)]
    text = printed(capsys)
    for part in (
        "model 0.03 M of 0.03 M weights are trained, lr 0.01, on cpu in torch.float32",
        "eval/loss before 2.0000 after 0.1667",
        "before é 0",
        "after é 6",
    ):
        assert part in text
    assert text.endswith("next: python evaluate.py")
    assert "val/gold" not in text, "not measured here"


def test_two_checkpoints_are_kept_and_the_newest_is_loaded(toy, capsys):
    """A finished run keeps one."""
    seen, flags = {}, "--steps 8 --save-every 3"
    watch = lambda run, step: seen.update({step: toy.steps()})  # noqa: E731
    assert toy.train(flags, "--stop-after 5", during=watch) == 0
    assert toy.steps() == [3, 5] and toy.train(flags, "--resume", during=watch) == 0
    assert "resumed at step 5" in capsys.readouterr().out
    assert toy.steps() == [8] and [seen[step] for step in (1, 4, 7)] == [[], [3], [5, 6]]


class Bomb:
    """Unpickled, it makes a folder: what any pickle from a stranger may do."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


def test_a_damaged_checkpoint_is_named(toy, tmp_path, monkeypatch):
    """A silent start from an older step would cut the log. A pickle is never run."""
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    toy.train("--stop-after 4")
    file = toy.out / "checkpoint" / "step-0000004.pt"
    content, bomb = file.read_bytes(), io.BytesIO()
    torch.save({"step": 4, "state": Bomb()}, bomb)
    for damaged in (content[: len(content) // 2], b"", bomb.getvalue()):
        file.write_bytes(damaged)
        before = contents(toy.out)
        refused = error_of(toy.train, "--resume")
        assert re.search("--resume .*step-0000004.pt: cannot be loaded", refused)
        assert contents(toy.out) == before
    assert not (tmp_path / "exploded").exists()
    file.write_bytes(content)
    run, _ = toy.opened("--resume")
    run.plan(8, "rows")
    run.state = {"model": common.load_policy(toy.model, lora_rank=2)}
    refused = error_of(run.start, run.state["model"], toy.tokenizer, 1e-2)
    assert "holds other weights than this model has" in refused
    shutil.rmtree(file.parent)
    toy.refuses("holds no run with a checkpoint/", "--resume")


def before_each_change(folder, patch):
    """A list that gets what lies in the folder before each change of it, while `patch` is in force."""
    states, save = [], torch.save

    def counted(change):
        return lambda *args, **kwargs: (states.append(contents(folder)), change(*args, **kwargs))[1]

    def in_halves(state, file):  # the file is torn in its middle, then whole but not flushed
        save(state, buffer := io.BytesIO())
        for part in (buffer.getvalue()[:1000], buffer.getvalue()[1000:]):
            states.append(contents(folder))
            file.write(part)
            file.flush()
        states.append(contents(folder))

    for name in ("rename", "replace", "mkdir", "rmdir", "unlink", "chmod"):
        patch.setattr(os, name, counted(getattr(os, name)))
    patch.setattr(os, "fsync", counted(lambda descriptor: None))  # no power fails here
    patch.setattr(torch, "save", in_halves)
    return states


@pytest.mark.slow
def test_killed_at_each_change_of_the_disk(toy, monkeypatch):
    """A kill leaves what lay there before the change that it prevents: a run that replaces another,
    is stopped and resumed, and then each of the states that it went through, resumed or replaced."""
    new = "--seed 5 --steps 3"
    toy.train("--overwrite", new)
    expected = toy.outcome()
    toy.train("--overwrite --stop-after 1")  # the run that lies there
    with monkeypatch.context() as patch:
        states = before_each_change(toy.out, patch)
        toy.train("--overwrite --stop-after 2", new)
        toy.train("--resume", new)
    assert toy.outcome() == expected and len(states) > 50
    different = [state for i, state in enumerate(states) if state not in states[:i]]
    for state in [*different, contents(toy.out)]:
        shutil.rmtree(toy.out)
        for path, content in {toy.out: None, **state}.items():
            path.mkdir() if content is None else path.write_bytes(content)
        try:
            try:
                common.load_tokenizer(toy.out)
                newest = toy.out / "checkpoint" / f"step-{max(toy.steps(), default=0):07d}.pt"
                at_step = torch.load(newest)
                for name, weight in common.load_policy(toy.out).named_parameters():
                    assert torch.equal(weight, at_step["state"]["model"][name]), "not what it shows"
            except UserError as error:
                assert "not finished" in str(error) or not toy.steps(), error
            toy.train("--resume", new)
        except UserError as error:
            assert re.search("--seed was 0, is 5|no run with a checkpoint", str(error))
            toy.train("--overwrite", new)
        assert toy.outcome() == expected


@pytest.mark.parametrize("number", SIGNALS)
def test_signals(number, toy, whole, capfd):
    before, presses = [signal.getsignal(n) for n in SIGNALS], [number]

    def press(run, step):
        assert signal.getsignal(signal.SIGINT) is not before[0]
        for pressed in presses if step == 3 else ():
            os.kill(os.getpid(), pressed)

    assert toy.train("--save-every 100", during=press) == 128 + number
    out, err = capfd.readouterr()
    assert "stopping after this step; --resume continues" in err
    assert f"stopped after step 3 of 6; its weights are in {toy.out}" in out
    assert toy.steps() == [3] and toy.numbers()[-1] == 3
    common.load_policy(toy.out)
    assert toy.train("--resume") == 0 and toy.outcome() == whole
    presses += SIGNALS
    with pytest.raises(KeyboardInterrupt):
        toy.train("--overwrite", during=press)
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_errors_of_the_user_end_in_one_line_and_status_2(capsys):
    ends = [
        (UserError("--pairs x: no such file"), 2, "error: --pairs x: no such file\n"),
        (OSError(28, "No space left on device"), 2, "No space left"),
        (ModuleNotFoundError("No module named 'wandb'"), 2, "'wandb'; install it with pip"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError(), None, ""),
    ]
    for error, code, text in ends:
        with pytest.raises(SystemExit if code else type(error)) as caught:
            files.command(Mock(side_effect=error))
        assert getattr(caught.value, "code", None) == code and text in capsys.readouterr().err


def test_fingerprints(tmp_path, toy):
    """One byte far inside a large file; of a folder what makes the model, and nothing that a run or
    its reader adds."""
    file, digests = tmp_path / "model.bin", set()
    for content in (b"\0", b"x"):
        with open(file, "wb") as handle:
            handle.seek(100 * (300 * 2**20 // 256))
            handle.write(content)
            handle.truncate(300 * 2**20)
        digests.add(files.fingerprint(file))
    assert len(digests) == 2
    folder = Path(shutil.copytree(toy.model, tmp_path / "model"))
    digests = [files.fingerprint(folder)]
    for name in ("metrics.jsonl", "notes.txt", "args.json", "report.json"):
        (folder / name).write_text("{}")
        assert [files.fingerprint(folder)] == digests
    for name in ("chat_template.jinja", "other.json"):
        (folder / name).write_text("{}")
        digests.append(files.fingerprint(folder))
    assert len({*digests}) == 3


def test_the_model_card(toy, tmp_path, capsys):
    """README.md says what the run knows; a section is replaced, a card of one's own stays."""
    base = toy.model
    toy.model = Path(shutil.copytree(base, tmp_path / "base"))
    header = "---\nlicense: apache-2.0\nbase_model: org/base\n---\n# Base\n"
    (toy.model / "README.md").write_text(header)
    toy.argv += ["--model", toy.model]
    toy.train()
    path, record = toy.out / "README.md", toy.record()
    card = ModelCard.load(path)  # the hub's own reader of the header
    assert card.data.base_model == "org/base" and card.data.license == "apache-2.0"
    assert card.data.tags == ["feedbackloop", "toy"]
    assert (
        "| eval/loss | 2.0000 | 0.1667 |" in card.text and "after step 6 of `toy.py`" in card.text
    )
    assert all(f"| {name} | {sha} |" in card.text for name, sha in record["sha256"].items())
    for number in (1, 2):
        assert add_section(toy.out, "fairness", "Fairness", [f"gap {number}", r"\1 | x"])
    text = path.read_text()
    assert text.count("## Fairness") == 1 and "gap 2\n\\1 | x" in text and "gap 1" not in text
    toy.train("--overwrite")
    assert "Fairness" not in path.read_text(), "said of other weights"
    path.write_text("mine")
    toy.train("--overwrite")
    assert path.read_text() == "mine" and not add_section(toy.out, "a", "A", [])
    assert "README.md is your own and stays" in capsys.readouterr().out


HEADERS = {  # of a base's README.md: what its runs say of base and licence
    "license: mit\nbase_model:\n- org/a\n": ("org/a", "mit"),
    "license: mit\nbase_model:\n  - 'org/a'\ntags:\n- x\n": ("org/a", "mit"),
    'base_model: [org/a]  # one\nlicense: "mit" # free': ("org/a", "mit"),
    "base_model: [org/a, org/b]\nlicense: |\n  mit": (None, "mit"),
    "base_model:\n- org/a\n- org/b\nlicense:\n": (None, None),
    "base_model: null\nlicense: ~": (None, None),
    "model:\n  license: mit\n": (None, None),
}


LAYOUTS = "---\n{}\n---\n# A", "\ufeff---\r\n{}\r\n--- \r\n", "---\n{}\n---"
NO_HEADERS = "", "no header\n---\nlicense: mit\n---\n", "---\nlicense: mit\n"


def test_headers_of_a_base(tmp_path):
    """Only one plain value is taken over; a list of two bases was one base of that name."""
    texts = {layout.format(h.strip()): HEADERS[h] for h in HEADERS for layout in LAYOUTS}
    for text, (base, licence) in {**texts, **dict.fromkeys(NO_HEADERS, (None, None))}.items():
        (tmp_path / "README.md").write_bytes(text.encode())
        want = {"base_model": base, "license": licence}
        assert base_of(str(tmp_path)) == {key: want[key] for key in want if want[key]}, text


def test_hub_ids_and_paths(tmp_path):
    assert base_of("org/model") == {"base_model": "org/model"} and base_of("gpt2")
    for path in (r"C:\models\mine", "/no/such/folder", "a b", str(tmp_path)):
        assert base_of(path) == {}


def card_record(model="org/base", command=("dpo.py",), **more):
    return {"stage": "dpo", "args": {"model": model}, "command": list(command), "sha256": {},
            "versions": {"torch": "2"}} | more  # fmt: skip


def test_a_card_stays_whole_whatever_its_names(tmp_path):
    """A pipe, line end, tag or fence in a name or a command breaks no table, block or section."""
    odd = "my|pairs\n<!-- x -->.jsonl"
    typed = ("dpo.py", "--system", "a\n```\n# b ````")
    write_card(tmp_path, card_record(command=typed, sha256={odd: "00"}), [("a", "1", "2")], 3)
    card = ModelCard.load(tmp_path / "README.md")
    (row,) = [line for line in card.text.split("\n") if line.endswith("| 00 |")]
    assert row.count("|") == 3 and "<!-- x" not in card.text
    for line in ("dpo.py --system 'a", "```", "# b ````'"):  # indented: a block of code
        assert f"\n    {line}\n" in card.text.replace("python ", "")
    assert card.data.base_model == "org/base"
    assert "its page on the hub states" in card.text
    write_card(tmp_path, card_record(r"C:\models\mine"), [], 0, "reward_hacking")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model is None and r"C:\models\mine does not state" in card.text
    assert r"It is `C:\models\mine`, unchanged: no later step of `dpo.py` validated" in card.text
    assert "better. watch.py ended the run early: reward_hacking. Licence" in card.text


def test_a_summary_is_written_and_reaches_wandb(tmp_path):
    run = SimpleNamespace(out=tmp_path, step=5, state={"ended": "plateau"}, wandb=SimpleNamespace())
    run.wandb.summary = {}
    write_summary(run, 3, {"test_after": {"score": 0.5}})
    head = {"step": 3, "last_step": 5, "stop_reason": "plateau"}
    assert run.wandb.summary == head | {"test_after": {"score": 0.5}}
    assert json.loads((tmp_path / "summary.json").read_text()) == run.wandb.summary


def test_the_commands_of_a_run():
    """Under torchrun python is not the launcher; a resumed run names its start, too."""
    assert commands(card_record()) == ["python dpo.py"]
    resumed = card_record(command=("dpo.py", "--resume"), processes=2, first_command=["dpo.py"])
    two = "torchrun --nproc-per-node 2 dpo.py"
    assert commands(resumed) == [two, f"{two} --resume"]


def test_results_join_the_card(tmp_path, capsys):
    """A card that no run wrote, or a folder without one, is left alone; one in Latin-1 survives."""
    for name in ("run", "own", "none"):
        (tmp_path / name).mkdir()
    write_card(tmp_path / "run", card_record(), [], 1)
    (tmp_path / "own" / "README.md").write_text("mine")
    path = tmp_path / "run" / "README.md"
    path.write_bytes(path.read_bytes() + b"caf\xe9\n")
    lines = {str(tmp_path / name): [f"{name} is fine."] for name in ("run", "own", "none")}
    for _ in range(2):
        add_result(lines | {"org/model": ["x"]}, "Compared", "evaluate.py compare", "r/report.html")
    assert capsys.readouterr().out == f"added to {path}: Compared\n" * 2
    text = path.read_bytes()
    assert text.count(b"run is fine.") == text.count(b"## Compared") == 1 and b"caf\xe9" in text
    assert b"`evaluate.py compare`, 20" in text and b"`r/report.html`" in text
    assert (tmp_path / "own" / "README.md").read_text() == "mine"
    add_result({str(tmp_path / "run"): []}, "Nothing", "x", "y")
    assert "## Nothing" not in path.read_text(errors="replace")
