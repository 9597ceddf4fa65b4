"""parts/runs.py: the optimiser step, log, checkpoint, resume and stop of a trainer; its batches.

test_resume.py kills real trainers as whole processes. Here a toy trainer runs on `Run`, and
functions that write are killed at one system call after the other, so that no gap is left untried.
"""

import io
import json
import math
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
from parts import files, runs
from parts.files import UserError
from tiny import tiny_model, tiny_reward_model, write_rows

if sys.platform != "linux":
    pytest.skip("forks and signals as on Linux", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("quiet_process")
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


# ---- a toy trainer ----


def arguments(*argv):
    parser = runs.Parser("toy.py --data mine.jsonl --out runs/toy", "A toy.")
    parser.add_argument("--data", nargs="+", default=["data/prefs.jsonl"])
    parser.add_argument("--model", default="base")
    parser.add_argument("--loss-type", choices=("sigmoid", "ipo"), default="sigmoid")
    parser.add_argument("--gold")
    parser.add_run_arguments("runs/toy", (1e-3, 1e-5, 1e-4))
    return parser.parse_args([str(a) for a in argv])


class Toy:
    """A run folder beside a data file; `train` is what the `main` of a trainer does."""

    def __init__(self, folder, model, tokenizer):
        self.out, self.model, self.tokenizer = folder / "run", model, tokenizer
        self.data = write_rows(folder / "rows.jsonl", [{"text": "a"}, {"text": "b"}])
        self.argv = ["--out", self.out, "--data", self.data, "--model", model, "--lr", 1e-2]
        self.argv += ["--batch-size", 2, "--steps", 6, "--save-every", 1]

    def opened(self, *flags, stage="toy"):
        """(run, model) after `Run` has looked at the folder and the model is loaded."""
        args = arguments(*self.argv, *flags)
        inputs = [args.model, *args.data]
        run = runs.Run(stage, args, inputs, ("loss", "nothing"), ("eval/loss", "val/gold"))
        return run, common.load_policy(args.model, run.dtype, run.device)

    def started(self, *flags, **state):
        """The same, with a plan of eight rows, its state and its optimiser."""
        run, model = self.opened(*flags)
        run.plan(8, "rows")
        run.state = {"model": model, **state}
        run.start(self.tokenizer, run.args.lr)
        return run, model

    def train(self, *flags, during=None):
        """Each step pulls all weights towards its number; during(run, step) may interfere."""
        history = {"steps": [], "last": torch.zeros(2)}
        run, model = self.started(*flags, sum=0, history=history)
        if run.step == 0:
            run.evaluation({"eval/loss": 2.0, "val/gold": None}, [{"prompt": "p", "answer": "é 0"}])
        for step in run.steps():
            for part in (0.25, 0.75):  # two micro-batches
                loss = sum((w - step).square().mean() for w in model.parameters()) * part
                run.backward(loss)
            if during:
                during(run, step)
            run.state["sum"] += step
            run.state["history"]["steps"].append(step)
            run.state["history"]["last"] = torch.tensor([step, 0.5])
            row = run.update(lambda step=step: f"file:{step}")
            run.log({"sum": run.state["sum"], **row, "tokens": 50})
            if run.evaluates(step):
                samples = [{"prompt": "p", "answer": f"é {step}"}]
                run.evaluation({"eval/loss": 1 / step}, samples)
        self.run = run
        return run.finish("python evaluate.py")

    def rows(self, name="metrics"):
        return list(files.read_jsonl(self.out / f"{name}.jsonl"))

    def numbers(self):
        return [row["step"] for row in self.rows()]

    def steps(self):
        """The checkpoints that are there."""
        return sorted(int(p.stem[-7:]) for p in (self.out / "checkpoint").glob("step-*"))

    def outcome(self):
        """Weights, log and samples, without the columns of the clock."""
        rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in self.rows()]
        return (self.out / "model.safetensors").read_bytes(), rows, self.rows("samples")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A GPT-2 of one layer, to be read and never written."""
    return tiny_model("gpt2", tmp_path_factory.mktemp("models"), n_layer=1)


@pytest.fixture
def toy(tmp_path, small, tokenizer):
    return Toy(tmp_path, small, tokenizer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small, tokenizer):
    """What six steps in one go end in; to be read only."""
    toy = Toy(tmp_path_factory.mktemp("whole"), small, tokenizer)
    assert toy.train() == 0
    return toy.outcome()


def contents(folder):
    return {p: p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def interrupted_at(last):
    """What `during` may do: end the run by an exception in the middle of a step."""

    def kill(run, step):
        if step == last:
            raise KeyboardInterrupt

    return kill


# ---- batches ----


def test_an_epoch_is_a_permutation_with_its_short_last_batch():
    """10 rows in batches of 4 are steps of 4, 4 and 2, each row once; the next epoch and another
    seed have another order."""
    orders = []
    for epoch in range(3):
        steps = [common.batch_indices(10, 4, 0, 3 * epoch + s) for s in (1, 2, 3)]
        assert [len(b) for b, _ in steps] == [4, 4, 2] and {e for _, e in steps} == {epoch}
        orders.append([int(i) for b, _ in steps for i in b])
        assert sorted(orders[-1]) == list(range(10))
    assert len({tuple(o) for o in orders}) == 3
    assert common.batch_indices(10, 4, 1, 1)[0].tolist() != orders[0][:4]
    assert common.batch_indices(10, 4, 0, 3, keep_order=True)[0].tolist() == [8, 9]
    assert common.batch_indices(3, 8, 0, 5)[1] == 4, "a batch larger than the data: an epoch a step"


def test_micro_batches_cut_but_never_reshape():
    """Rows of like length go together and none is lost; a row beyond the limit goes alone. Lengths
    9, 2, 3, 8, 30, 2 and 18 tokens per forward: 30 | 9, 8 (2·9 = 18) | 3, 2, 2 (3·3 = 9)."""
    lengths = np.array([9, 2, 3, 8, 30, 2, 99])
    parts = common.micro_batches([0, 1, 2, 3, 4, 5], lengths, 18)
    assert [p.tolist() for p in parts] == [[4], [0, 3], [2, 1, 5]]
    assert common.micro_batches([3, 1], [5, 5, 5, 5], 1)[0].tolist() == [3], "ties keep their order"
    assert common.micro_batches([], lengths, 18) == []


# ---- plan, schedule, optimiser, update ----


def test_the_plan_and_the_rate_by_size(capsys):
    """--steps; else --epochs passes, whose last batch may be short; else as many passes as make
    `least` steps. The rate: below 100 M parameters, above, and LoRA whatever the size."""
    cases = [([], 1, 3), (["--epochs", 2], 1, 6), ([], 7, 9)]
    for flags, least, steps in [*cases, (["--epochs", 2], 7, 6), (["--steps", 5], 7, 5)]:
        run = SimpleNamespace(args=arguments("--batch-size", 4, *flags))
        runs.Run.plan(run, 10, "rows", least)
        assert run.planned == steps
    assert "10 rows in batches of 4; steps per epoch 3, in total 5" in capsys.readouterr().out
    rates = 1e-3, 1e-5, 1e-4
    small, large = (SimpleNamespace(num_parameters=lambda n=n: n) for n in (10**7, 10**8))
    assert [runs.default_lr(model, rates) for model in (small, large)] == [1e-3, 1e-5]
    small.lora_config = {}
    assert runs.default_lr(small, rates) == 1e-4


SCHEDULES = {
    "constant": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8],
    "cosine": [0.5, 1] + [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_by_hand(schedule, toy):
    """10 steps with a warm-up of .2: half the rate, the rate, then down over 8 steps. The first
    step never has rate 0, and what is logged is the optimiser's rate."""
    expected = SCHEDULES[schedule]
    factors = [runs.lr_factor(step, 10, 0.2, schedule) for step in range(1, 11)]
    assert factors == pytest.approx(expected)
    assert runs.lr_factor(1, 1, 0.0, schedule) == 1, "one step without warm-up is a whole one"
    toy.train("--schedule", schedule, "--warmup", 0.2, "--steps", 10, "--stop-after", 4)
    logged = [row["lr"] for row in toy.rows() if "lr" in row]
    assert logged == pytest.approx([1e-2 * factor for factor in expected[:4]])
    assert toy.run.optimizer.param_groups[0]["lr"] == logged[-1]


def test_one_optimiser_over_several_modules(toy, tmp_path, capsys):
    """Policy and critic share one AdamW without decay: each trained weight is in one group, frozen
    ones in none, a fresh head has its own rate, and the schedule moves both rates."""
    run, policy = toy.opened("--schedule", "linear", "--warmup", 0)
    reward = tiny_reward_model("gpt2", tmp_path, n_layer=1)
    critic = common.load_reward_model(reward, toy.tokenizer)
    critic.transformer.wpe.requires_grad_(False)
    run.plan(8, "rows")
    run.state = {"policy": policy, "kl": 0.1, "critic": critic}
    run.start(toy.tokenizer, 1e-4, head_lr=1e-3)
    assert run.model is policy
    groups = {id(w): g for g in run.optimizer.param_groups for w in g["params"]}
    assert sum(len(g["params"]) for g in run.optimizer.param_groups) == len(groups)
    named = [pair for module in (policy, critic) for pair in module.named_parameters()]
    assert any(not w.requires_grad for _, w in named) and policy.training and critic.training
    for name, weight in named:
        assert (id(weight) in groups) == weight.requires_grad, name
        if weight.requires_grad:
            rate = 1e-3 if name == "score.weight" else 1e-4
            assert groups[id(weight)]["base_lr"] == rate, name
            assert groups[id(weight)]["weight_decay"] == 0
    trained = sum(w.numel() for _, w in named if w.requires_grad) / 1e6
    total = sum(w.numel() for _, w in named) / 1e6
    assert f"{trained:.2f} M of {total:.2f} M weights are trained" in capsys.readouterr().out
    run.step = 4  # of 6: half of the rate is left
    run.backward(sum(w.sum() for _, w in named))
    assert run.update(str)["lr"] == pytest.approx(5e-5)
    assert sorted(g["lr"] for g in run.optimizer.param_groups) == pytest.approx([5e-5, 5e-4])


def test_the_loss_is_summed_and_the_gradient_clipped(toy):
    """Micro-batches of .25 and .75 of the loss are logged as the whole; the norm is the one before
    clipping at 1, after which a step by hand gives the same weights; nothing is left over."""
    run, model = toy.started("--schedule", "constant", "--warmup", 0)
    twin, run.step = common.load_policy(toy.model), 1
    for part in (0.25, 0.75):
        run.backward(sum((w - 3).square().sum() for w in model.parameters()) * part)
    norms = []  # of the gradient that the optimiser sees: AdamW hides its scale

    def watch(*_):
        norms.append(torch.cat([w.grad.flatten() for w in model.parameters()]).norm().item())

    run.optimizer.register_step_pre_hook(watch)
    row = run.update(str)
    assert norms == [pytest.approx(1, abs=1e-4)]
    loss = sum((w - 3).square().sum() for w in twin.parameters())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), 1e-2, weight_decay=0.0).step()
    assert norm > 1 and row["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6) and row["skipped_steps"] == 0
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert run.loss == 0 and all(w.grad is None for w in model.parameters())


def test_what_is_not_finite_stops_the_run(toy):
    """NaN in one batch is NaN in all weights: the run stops in front of the update and names the
    rows; the checkpoint is of the step before. Weights that the last step broke are not saved."""

    def loss(run, step):
        if step == 3:
            run.backward(next(run.model.parameters()).sum() * math.nan)

    def gradient(run, step):
        next(run.model.parameters()).grad[0, 0] = math.inf

    def weights(run, step):
        if step == 6:
            run.model.transformer.wte.weight.data[0, 0] = math.nan
            run.optimizer.zero_grad()
            run.backward(run.model.transformer.ln_f.weight.sum())

    with pytest.raises(UserError, match="not finite; rows file:3. Lower --lr, or look at these"):
        toy.train(during=loss)
    assert toy.steps() == [1, 2] and toy.numbers() == [0, 1, 2]
    with pytest.raises(UserError, match="gradient norm (inf|nan): not finite; rows file:1"):
        toy.train("--overwrite", during=gradient)
    with pytest.raises(UserError, match="--lr: the weights are no longer finite; lower it"):
        toy.train("--overwrite", during=weights)
    common.load_policy(toy.out)


def test_an_fp16_overflow_skips_the_step(toy):
    """torch's own scaler under --dtype fp16. Steps 2 and 3 of six overflow: they are counted, the
    weights stay, the scale is halved, in a resumed run too. Sixteen in a row are survived; from
    65536 seventeen halvings are a scale below 1, where overflow is not the cause."""
    scales, before, flags = [], {}, ("--dtype", "fp16", "--steps", 20, "--save-every", 50)

    def overflow(*at):
        def spoil(run, step):
            weight = next(run.model.parameters())
            if step in at:
                weight.grad[0, 0] = math.inf
            before[step] = weight.detach().clone()
            scales.append(run.scaler.get_scale())

        return spoil

    assert toy.train("--dtype", "fp16", "--stop-after", 4, during=overflow(2, 3)) == 0
    assert toy.train("--dtype", "fp16", "--resume", during=overflow()) == 0
    rows = [r for r in toy.rows() if "lr" in r]
    assert [r["skipped_steps"] for r in rows] == [0, 1, 1, 0, 0, 0]
    assert scales == [2.0**16, 2.0**16, 2.0**15, *[2.0**14] * 3]
    assert [torch.equal(before[i], before[i + 1]) for i in range(1, 6)] == [0, 1, 1, 0, 0]
    assert max(r["loss"] for r in rows) < 1000, "what is logged is not scaled"
    assert toy.train(*flags, "--overwrite", during=overflow(*range(2, 18))) == 0
    with pytest.raises(UserError, match="gradient norm (inf|nan): not finite; rows file:18"):
        toy.train(*flags, "--overwrite", during=overflow(*range(2, 19)))


# ---- the run folder ----


def test_a_folder_that_may_not_be_used_is_untouched(toy, tmp_path, monkeypatch):
    """A run, a model that no run of ours made (a mistyped `--out my-model --overwrite` would delete
    it), a folder with an input of the run. A folder with other things is free, but for --resume."""
    assert toy.train() == 0
    model, mine = tmp_path / "model", shutil.copytree(toy.model, tmp_path / "mine")
    shutil.copytree(toy.model, model)
    inside = write_rows(model / "rows.jsonl", [{"text": "a"}])
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    content = contents(tmp_path)
    cases = [
        ((), r"holds a run; pass --resume .* --overwrite .*another --out"),
        (("--resume", "--overwrite"), "--resume .*, --overwrite .*; pass one of them"),
        (("--out", notes, "--resume"), "notes holds no run with a checkpoint/"),
    ]
    for flags in ((), ("--overwrite",), ("--resume",)):
        own = ("--out", model, "--model", model, *flags)
        cases.append((own, f"it contains the input {model}; choose another folder"))
        data = ("--out", model, "--model", "hub/name", "--data", inside, *flags)
        cases.append((data, f"it contains the input {inside}"))
        cases.append((("--out", mine, *flags), "holds config.json but no args.json"))
    for flags, message in cases:
        with pytest.raises(UserError, match=message):
            toy.opened(*flags)
    toy.opened("--out", notes, "--overwrite")
    assert content == contents(tmp_path)


def test_overwrite_removes_the_run_and_nothing_else(toy):
    """--overwrite on `--out .` must not be `rm -r`: of a folder with a run and a user's own files
    exactly the run goes, with its tokenizer: another model's template would stay in its file."""
    toy.train()
    old = ["adapter/old", "checkpoint/old", "added_tokens.json"]
    old += ["merges.txt", "additional_chat_templates/old.jinja", "rollouts.jsonl"]
    mine = ["notes.txt", "thesis/chapter.tex", "report.json", "data.jsonl", ".env", ".git/config"]
    for name in [*old, *mine]:
        (toy.out / name).parent.mkdir(exist_ok=True)
        (toy.out / name).write_text("mine")
    seen = []
    watch = lambda run, step: seen.extend(contents(toy.out)) if step == 1 else None  # noqa: E731
    assert toy.train("--overwrite", "--seed", 5, during=watch) == 0
    assert all((toy.out / name).read_text() == "mine" for name in mine)
    new = {"args.json", "metrics.jsonl", "samples.jsonl", "config.json", "generation_config.json"}
    new |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    now = {str(p.relative_to(toy.out)) for p in seen}
    assert now - set(mine) - {"special_tokens_map.json"} == new, "as the first step found it"
    assert json.loads((toy.out / "args.json").read_text())["args"]["seed"] == 5
    assert toy.numbers() == [0, 1, 2, 3, 4, 5, 6, 6]


def test_args_json_says_what_made_the_run(toy):
    """Stage, resolved arguments, versions, and a hash of each input: what a repetition needs."""
    toy.train("--stop-after", 1)
    record = json.loads((toy.out / "args.json").read_text())
    assert record["stage"] == "toy" and record["args"]["lr"] == 1e-2
    assert record["args"]["micro_tokens"] == 1024
    assert {"torch", "transformers", "tokenizers", "numpy"} == record["versions"].keys()
    hashes = {name: runs.fingerprint(name) for name in (toy.data, toy.model)}
    assert record["sha256"] == hashes and all(len(h) == 64 for h in hashes.values())


# ---- resume ----

CHANGES = {
    ("--seed", 1): "--seed was 0, is 1",
    ("--lr", 2e-4): "--lr was 0.01, is 0.0002",
    ("--loss-type", "ipo"): "--loss-type was 'sigmoid', is 'ipo'",
    ("--gold", "g.py:f"): "--gold was None, is 'g.py:f'",
    ("--seed", 1, "--lora-rank", 4): "--seed was 0, is 1; --lora-rank|--lora-rank was 0, is 4; -",
}


def test_resume_refuses_another_run_by_name(toy, tmp_path):
    """Resumed with another seed, rate, data file, model or stage, a run becomes one that nobody
    can repeat: what differs is named, also one byte of the data or one weight of the model."""
    model = Path(shutil.copytree(toy.model, tmp_path / "model"))
    toy.argv += ["--model", model]
    toy.train("--stop-after", 1)
    before = contents(toy.out)
    for flags, message in CHANGES.items():
        with pytest.raises(UserError, match=f"--resume: not the run in .*({message})") as caught:
            toy.opened("--resume", *flags)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--resume: .*run was made by toy.py"):
        toy.opened("--resume", stage="reward_train")
    for file, name in ((Path(toy.data), "rows.jsonl"), (model / "model.safetensors", "model")):
        content = file.read_bytes()
        file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(UserError, match=f"{name} has changed"):
            toy.opened("--resume")
        file.write_bytes(content)
    toy.opened("--resume")
    assert contents(toy.out) == before


def test_what_was_left_to_a_default_stays_what_it_was(toy, monkeypatch):
    """On another machine --micro-tokens may have another default, and it changes the order of sums;
    a resume that leaves --lr or --steps out must not follow another schedule to another end."""
    toy.train("--stop-after", 2)
    monkeypatch.setattr(runs.parallel, "micro_tokens", lambda run: 99)
    for flag in ("--lr", "--steps"):
        place = toy.argv.index(flag)
        del toy.argv[place : place + 2]
    run, _ = toy.opened("--resume")
    assert (run.args.micro_tokens, run.args.lr) == (1024, 1e-2)
    assert toy.train("--resume") == 0 and toy.numbers()[-1] == 6
    run, _ = toy.opened("--overwrite")
    assert (run.args.micro_tokens, run.args.lr) == (99, None)


def test_resume_allows_what_changes_no_weight(toy):
    """How often to save and evaluate, when to stop, and a longer plan are the user's to change."""
    toy.train("--stop-after", 2)
    before = json.loads((toy.out / "args.json").read_text())
    toy.train("--resume", "--save-every", 3, "--eval-every", 1, "--stop-after", 4, "--steps", 60)
    after = json.loads((toy.out / "args.json").read_text())
    changed = {k for k, v in after["args"].items() if before["args"][k] != v}
    assert changed == {"save_every", "eval_every", "steps", "stop_after", "resume"}
    assert {**before, "args": 0} == {**after, "args": 0}
    assert toy.steps() == [3, 4] and toy.numbers() == [0, 1, 2, 3, 3, 4, 4]
    assert toy.train("--resume") == 0, "back to the plan of before"


def test_a_resumed_run_is_the_run_in_one_go(toy, whole, capsys):
    """Weights, moments, schedule, log, samples, and whatever else lies in `state`."""
    assert toy.train("--stop-after", 2) == 0
    assert "stopped after step 2 of 6" in capsys.readouterr().out
    for folder in (toy.out, toy.out / "checkpoint"):
        (folder / ".writing-half").write_text("left by a kill")
    assert toy.train("--resume", "--stop-after", 2) == 0, "already there: on to the end"
    assert "resumed at step 2" in capsys.readouterr().out and toy.outcome() == whole
    assert [*toy.out.rglob(".*")] == []
    state = toy.run.state
    assert state["sum"] == 21 and state["history"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert state["history"]["last"].tolist() == [6, 0.5]
    assert toy.train("--resume") == 0, "a run that has ended: only its end is repeated"
    assert toy.outcome() == whole and toy.run.state["sum"] == 21
    assert toy.train("--resume", "--steps", 8) == 0 and toy.numbers()[-1] == 8
    assert toy.train("--resume") == 0 and toy.numbers()[-1] == 8, "a plan that is behind it"


def test_a_run_that_has_ended_stays_ended(toy):
    """state["ended"], a rule's reason, ends the run after its step, and again on --resume."""

    def alarm(run, step):
        run.state["ended"] = "a rule" if step == 3 else None

    assert toy.train(during=alarm) == 0 and toy.numbers()[-1] == 3 and toy.steps() == [2, 3]
    before = toy.outcome()
    assert toy.train("--resume") == 0 and toy.outcome() == before


# ---- logs ----


@pytest.mark.parametrize("tail", [b'{"step": 2}', '{"step": 4, "answer": "é'.encode()[:-1]])
def test_a_log_is_cut_back_to_the_checkpoint(tail, toy, whole, capsys):
    """Rows after the checkpoint would stand twice in the log, and a line torn by a kill, in the
    middle of a character even, would break every reader. The checkpoint is of step 2; steps 3 and
    4 were logged, and half a line. Without any checkpoint the run starts from step 0."""
    with pytest.raises(KeyboardInterrupt):
        toy.train("--save-every", 2, "--eval-every", 3, during=interrupted_at(5))
    assert toy.numbers() == [0, 1, 2, 3, 3, 4]
    for name in ("metrics", "samples"):
        with open(toy.out / f"{name}.jsonl", "ab") as file:
            file.write(tail)
    (toy.out / "checkpoint" / "step-0000004.pt").unlink()
    again = shutil.copytree(toy.out, toy.out.parent / "again")
    assert toy.train("--resume") == 0 and toy.outcome() == whole
    (again / "checkpoint" / "step-0000002.pt").unlink()
    toy.out, capsys_out = again, capsys.readouterr().out
    assert toy.train("--out", again, "--resume") == 0 and toy.outcome() == whole
    assert "resumed at step 2" in capsys_out
    assert "resumed at step 0" in capsys.readouterr().out


def test_rows_are_written_at_once(toy, capsys):
    """A log that is flushed at the end shows nothing of a run that was killed. NaN and inf are
    null. The last lines show each headline number that there is, and one prompt with its answer
    before and after."""
    seen = []

    def read(run, step):
        run.write("rollouts.jsonl", [{"step": step, "x": math.inf}])
        seen.append((len(toy.rows()), toy.rows("rollouts")[-1]))

    assert toy.train(during=read) == 0
    assert seen == [(step, {"step": step, "x": None}) for step in range(1, 7)]
    first, second, *_ = toy.rows()
    assert first["step"] == 0 and first["eval/loss"] == 2.0 and first["val/gold"] is None
    assert second["tokens_per_s"] > 0 and second["time_s"] >= 0 and second["peak_mem_mb"] > 10
    assert toy.rows("samples") == [{"step": s, "prompt": "p", "answer": f"é {s}"} for s in (0, 6)]
    said = " ".join(capsys.readouterr().out.split())
    model = "model 0.03 M of 0.03 M weights are trained, lr 0.01, on cpu in torch.float32"
    for words in (model, "eval/loss before 2.0000 after 0.1667", "before é 0", "after é 6"):
        assert words in said
    assert said.endswith("next: python evaluate.py")
    assert "val/gold" not in said, "not measured here"


def test_wandb_hears_of_each_row_and_of_the_end(toy, monkeypatch):
    """wandb ends a run in a hook of Python's own end, which a process under torchrun leaves out
    (`files.command`): so it is told."""
    calls = []
    run = SimpleNamespace(log=lambda row, step: calls.append(step), finish=lambda: calls.append(-1))
    fake = SimpleNamespace(init=lambda **_: run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for end, expected in (
        (["--stop-after", 2], [0, 1, 2, -1]),
        (["--resume"], [3, 4, 5, 6, 6, -1]),
    ):
        assert toy.train("--wandb-project", "mine", *end) == 0
        assert calls == expected
        calls.clear()


# ---- checkpoints ----


def test_two_checkpoints_are_kept_and_the_newest_is_loaded(toy, capsys):
    """Steps are sorted as numbers: as text, step-9 would be newer than step-10. They are due every
    so many steps, at --stop-after and at the last one."""
    assert toy.train("--steps", 12, "--stop-after", 10) == 0
    names = sorted(p.name for p in (toy.out / "checkpoint").iterdir())
    assert names == ["step-0000009.pt", "step-0000010.pt"]
    toy.train("--steps", 12, "--resume", "--stop-after", 11)
    assert "resumed at step 10" in capsys.readouterr().out
    seen, flags = {}, ("--steps", 8, "--save-every", 3)
    watch = lambda run, step: seen.update({step: toy.steps()})  # noqa: E731
    assert toy.train(*flags, "--overwrite", "--stop-after", 5, during=watch) == 0
    assert seen[1] == [], "a new run does not look at old checkpoints"
    assert seen[4] == [3] and toy.steps() == [3, 5]
    assert toy.train(*flags, "--resume", during=watch) == 0
    assert seen[7] == [5, 6] and toy.steps() == [6, 8]


class Bomb:
    """Unpickled, it makes a folder: what any pickle from a stranger may do."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


def test_a_damaged_checkpoint_is_named(toy, whole, tmp_path, monkeypatch):
    """A silent start from an older step, or from 0, would cut the log. One line names the file to
    delete to resume from the one before; then the run ends as if nothing had happened. A pickle is
    never run. If checkpoint/ is gone, --resume is refused."""
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    toy.train("--stop-after", 4)
    file = toy.out / "checkpoint" / "step-0000004.pt"
    content = file.read_bytes()
    torch.save({"step": 4, "state": Bomb()}, tmp_path / "bomb")
    pickled = (tmp_path / "bomb").read_bytes()
    for damaged in (content[: len(content) // 2], b"", pickled):
        file.write_bytes(damaged)
        before = contents(toy.out)
        with pytest.raises(UserError, match="--resume .*step-0000004.pt: cannot be loaded") as e:
            toy.train("--resume")
        assert "\n" not in str(e.value) and contents(toy.out) == before
    assert not (tmp_path / "exploded").exists()
    file.unlink()
    assert toy.train("--resume") == 0 and toy.outcome() == whole
    run, _ = toy.opened("--resume", "--steps", 9)
    run.plan(8, "rows")
    run.state = {"model": common.load_policy(toy.model, lora_rank=2)}
    with pytest.raises(UserError, match="holds other weights than this model has"):
        run.start(toy.tokenizer, 1e-2)
    shutil.rmtree(toy.out / "checkpoint")
    before = contents(toy.out)
    with pytest.raises(UserError, match="holds no run with a checkpoint/"):
        toy.train("--resume")
    assert contents(toy.out) == before


def failing(error):
    def call(*args, **kwargs):
        raise error

    return call


FULL = OSError(28, "No space left on device")


# ---- killed at each change of the disk ----

CALLS = ("rename", "replace", "fsync", "mkdir", "rmdir", "unlink", "chmod")


def killed_at(number, act):
    """Run act() in a child that dies by SIGKILL at its `number`-th change of the disk; True if it
    lived to the end."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, f"the child failed: {status}"
        return status == 0
    count = 0

    def tick():
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function):
        def call(*args, **kwargs):
            tick()
            return function(*args, **kwargs)

        return call

    plain, code = torch.save, 1

    def in_halves(state, file):  # the file is torn in its middle, then whole but not flushed
        plain(state, buffer := io.BytesIO())
        content = buffer.getvalue()
        for part in (content[: len(content) // 2], content[len(content) // 2 :]):
            tick()
            file.write(part)
            file.flush()
        tick()

    try:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        os.fsync = counted(lambda descriptor: None)  # no power fails here
        torch.save = in_halves
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def every_kill(act, check, prepare):
    """Kill act() at its first, second, … change of the disk, each time on a fresh folder; returns
    how many there were."""
    number, lived = 0, False
    while not lived:
        number += 1
        prepare()
        lived = killed_at(number, act)
        check(lived)
    return number - 1


def restored(folder, source):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)


def test_a_kill_while_a_run_is_opened_or_replaced(toy, tmp_path, monkeypatch):
    """Killed between the files of the old run that --overwrite removes: what is left can be
    replaced by the same command, and never looks like a run that can be resumed with the new
    arguments. Nothing of the kill is left over."""
    toy.train("--stop-after", 2)
    shutil.copytree(toy.out, tmp_path / "old")
    model = common.load_policy(toy.model)
    monkeypatch.setattr(common, "load_policy", lambda *args: model)
    monkeypatch.setattr(runs.Run, "save", lambda *args, **kwargs: None)  # has its own test
    new = ("--seed", 5)

    def act():
        run, _ = toy.started("--overwrite", *new)
        run._open()

    def check(lived):
        replaced = json.loads((toy.out / "args.json").read_text())["args"]["seed"] == 5
        assert replaced or not lived
        if replaced:
            assert toy.steps() == [] and not (toy.out / "metrics.jsonl").exists()
        else:
            with pytest.raises(UserError, match="--seed was 0, is 5|no run with a checkpoint"):
                toy.opened("--resume", *new)
        act()
        assert [p.name for p in toy.out.rglob(".*")] == []

    assert every_kill(act, check, lambda: restored(toy.out, tmp_path / "old")) >= 12


def test_a_kill_while_a_model_or_a_file_is_replaced(tmp_path, small, tokenizer):
    """The weights change from 1 to 2 while the folder is rewritten, killed at each disk operation:
    it opens each time, with all weights at 1 or all at 2. A rewritten log is the old or the new."""
    folder, model = tmp_path / "out", common.load_policy(small)

    def at(value):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(value)
        common.save_model(model, tokenizer, folder)

    def check(lived):
        opened = common.load_policy(str(folder))
        values = {v for p in opened.parameters() for v in p.unique().tolist()}
        assert values == {2.0} if lived else values in ({1.0}, {2.0})
        assert common.load_tokenizer(str(folder)).chat_template == tokenizer.chat_template

    assert every_kill(lambda: at(2.0), check, lambda: at(1.0)) >= 10
    path, old, new = tmp_path / "rows.jsonl", [{"a": 1}] * 3, [{"b": 2}] * 5

    def check_rows(lived):
        assert list(files.read_jsonl(path)) in ([new] if lived else [old, new])

    write = files.write_jsonl
    assert every_kill(lambda: write(path, new), check_rows, lambda: write(path, old)) >= 3


# ---- stopping ----


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_finishes_the_step(number, toy, whole, capfd):
    """Ctrl-C in the middle of a step must not lose the step: it ends, with a checkpoint and a
    model, the exit code is 128 + signal, and --resume goes on."""

    def press(run, step):
        if step == 3:
            os.kill(os.getpid(), number)

    assert toy.train("--save-every", 100, during=press) == 128 + number
    out, err = capfd.readouterr()
    assert "stopping after this step; --resume continues" in err
    assert f"stopped after step 3 of 6; its weights are in {toy.out}" in out
    assert toy.steps() == [3] and toy.numbers()[-1] == 3
    common.load_policy(toy.out)
    assert toy.train("--resume") == 0 and toy.outcome() == whole


def test_a_second_ctrl_c_does_not_wait(toy):
    """Who presses it twice means it. The handlers of before come back however a run ends: a
    notebook calls main() and goes on."""
    before = [signal.getsignal(n) for n in SIGNALS]

    def press(run, step):
        assert signal.getsignal(signal.SIGINT) is not before[0]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        toy.train(during=press)
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_errors_of_the_user_end_in_one_line_and_status_2(capsys):
    """A traceback for a mistyped path frightens and hides the path. Other errors are bugs."""
    for error, code, text in (
        (UserError("--pairs x: no such file"), 2, "error: --pairs x: no such file\n"),
        (OSError(28, "No space left on device"), 2, "No space left"),
        (ModuleNotFoundError("No module named 'wandb'"), 2, "'wandb'; install it with pip"),
        (KeyboardInterrupt(), 130, ""),
    ):
        with pytest.raises(SystemExit) as caught:
            files.command(failing(error))
        assert caught.value.code == code and text in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        files.command(lambda: 1 / 0)


# ---- fingerprints ----


def test_a_large_file_is_not_known_by_its_ends_alone(tmp_path):
    """A fine-tune that moves some layers only has the first and the last MiB of its start. Of 300
    MiB 256 samples of 1 MiB stand 1.17 MiB apart; one byte of the hundredth is changed."""
    file, size = tmp_path / "model.bin", 300 * 2**20
    with open(file, "wb") as handle:
        handle.truncate(size)
    before = runs.fingerprint(file)
    with open(file, "r+b") as handle:
        handle.seek(100 * (size // 256))
        handle.write(b"x")
    assert runs.fingerprint(file) != before


def test_a_folder_is_known_by_its_weights_and_configs(tmp_path, toy):
    """The log of a run may grow and a report may be added; a config or a template may not change."""
    folder = Path(shutil.copytree(toy.model, tmp_path / "model"))
    before = runs.fingerprint(folder)
    for name in ("args.json", "report.json", "metrics.jsonl", "notes.txt"):
        (folder / name).write_text("{}")
    assert runs.fingerprint(folder) == before
    (folder / "chat_template.jinja").write_text("another")
    changed = runs.fingerprint(folder)
    shutil.copy(folder / "config.json", folder / "other.json")
    assert len({before, changed, runs.fingerprint(folder)}) == 3
