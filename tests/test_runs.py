"""parts/runs.py: flags, run folder, optimiser step, log, checkpoint, resume and stop of a trainer; and the batches it draws.

test_resume.py kills real trainers as whole processes. Here a toy trainer runs on `Run`, and functions that write are killed
at one system call after the other, so that no gap between two of them is left untried.
"""

import io
import json
import math
import os
import shutil
import signal
import sys
import traceback
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
from parts import files, runs
from parts.files import UserError
from tiny import tiny_model, tiny_reward_model, tiny_tokenizer, write_rows

if sys.platform != "linux":
    pytest.skip("forks and signals as on Linux", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("quiet_process")
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}


# ---- a toy trainer ----


def arguments(*argv):
    parser = runs.Parser("toy.py --data mine.jsonl --out runs/toy", "A toy.")
    parser.add_argument("--data", nargs="+", default=["data/prefs.jsonl"], help="JSONL of rows")
    parser.add_argument("--model", default="base")
    parser.add_argument("--loss-type", choices=("sigmoid", "ipo"), default="sigmoid")
    parser.add_argument("--gold")
    parser.add_run_arguments("runs/toy", (1e-3, 1e-5, 1e-4))
    return parser.parse_args([str(a) for a in argv])


class Toy:
    """A run folder beside a data file and a model; `train` is what the `main` of a trainer does."""

    def __init__(self, folder):
        self.out = folder / "run"
        self.data = write_rows(folder / "rows.jsonl", [{"text": "a"}, {"text": "b"}])
        self.model = tiny_model("gpt2", folder, n_layer=1)
        self.argv = ["--out", self.out, "--data", self.data, "--model", self.model, "--lr", 1e-2]
        self.argv += ["--batch-size", 2, "--steps", 6, "--save-every", 1]

    def opened(self, *flags, stage="toy"):
        """(run, model) after `Run` has looked at the folder and the model is loaded."""
        args = arguments(*self.argv, *flags)
        inputs = [args.model, *args.data]
        run = runs.Run(stage, args, inputs, ("loss", "nothing"), ("eval/loss", "val/gold"))
        return run, common.load_policy(args.model, run.dtype, run.device)

    def train(self, *flags, during=None, stage="toy"):
        """Each step pulls all weights towards a number of its own; during(run, step) may interfere. The exit code."""
        run, model = self.opened(*flags, stage=stage)
        run.plan(8, "rows")
        run.state = {"model": model, "sum": 0, "history": {"steps": [], "last": torch.zeros(2)}}
        run.start(tiny_tokenizer(), run.args.lr)
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

    def steps(self):
        """The checkpoints that are there."""
        return sorted(int(p.name[-7:]) for p in (self.out / "checkpoint").glob("step-*"))

    def outcome(self):
        """Weights, log and samples, without the columns of the clock."""
        rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in self.rows()]
        return (self.out / "model.safetensors").read_bytes(), rows, self.rows("samples")


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What six steps in one go end in; to be read only."""
    toy = Toy(tmp_path_factory.mktemp("whole"))
    assert toy.train() == 0
    return toy.outcome()


def contents(folder):
    return {p: p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


# ---- batches ----


def test_an_epoch_is_a_permutation_with_its_short_last_batch():
    """A dropped tail loses rows, a draw with replacement repeats some: 10 rows in batches of 4 are 3 steps of 4, 4 and 2,
    each row once; the next epoch has another order, and another seed too.
    """
    orders = []
    for epoch in range(3):
        steps = [common.batch_indices(10, 4, 0, 3 * epoch + s) for s in (1, 2, 3)]
        assert [len(b) for b, _ in steps] == [4, 4, 2] and {e for _, e in steps} == {epoch}
        orders.append([int(i) for b, _ in steps for i in b])
        assert sorted(orders[-1]) == list(range(10))
    assert len({tuple(o) for o in orders}) == 3
    assert common.batch_indices(10, 4, 1, 1)[0].tolist() != orders[0][:4]
    assert common.batch_indices(10, 4, 0, 2)[0].tolist() == orders[0][4:8], "no state: any step, any time"  # fmt: skip
    kept = [i for s in (1, 2, 3) for i in common.batch_indices(10, 4, 0, s, keep_order=True)[0]]
    assert kept == list(range(10))
    assert common.batch_indices(3, 8, 0, 5)[1] == 4, "a batch larger than the data: an epoch a step"


def test_micro_batches_cut_but_never_reshape():
    """Rows of like length go together and none is lost; a row longer than the limit goes alone, it is not dropped.

    Lengths 9, 2, 3, 8, 30, 2 and 18 tokens a forward: 30 | 9, 8 (2·9 = 18) | 3, 2, 2 (3·3 = 9).
    """
    lengths = np.array([9, 2, 3, 8, 30, 2, 99])
    parts = common.micro_batches([0, 1, 2, 3, 4, 5], lengths, 18)
    assert [p.tolist() for p in parts] == [[4], [0, 3], [2, 1, 5]]
    rng = np.random.default_rng(0)
    for _ in range(100):
        lengths, limit = rng.integers(1, 50, 40), int(rng.integers(1, 400))
        rows = rng.permutation(40)[:25]
        parts = common.micro_batches(rows, lengths, limit)
        assert sorted(i for p in parts for i in p) == sorted(rows)
        for part in parts:
            assert len(part) * lengths[part].max() <= limit or len(part) == 1
    assert common.micro_batches([3, 1], [5, 5, 5, 5], 1)[0].tolist() == [3], "ties keep their order"


def test_length_sorting_saves_padding():
    """Rows of all lengths in one forward are padded to the longest. 16 rows with log-normal lengths, median 140, nine tenths
    below 365, at most 384, in forwards of 1024 tokens: at most 20 % padding, where four neighbours of the file have > 35 %.
    """
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(math.log(140), math.log(365 / 140) / 1.2816, 512))
    lengths = lengths.clip(2, 384).astype(int)
    sorted_columns = file_columns = 0
    for step in range(1, 33):
        batch, _ = common.batch_indices(512, 16, 0, step)
        parts = common.micro_batches(batch, lengths, 1024)
        sorted_columns += sum(len(part) * lengths[part].max() for part in parts)
        file_columns += sum(4 * lengths[batch[i : i + 4]].max() for i in range(0, 16, 4))
    assert 1 - lengths.sum() / sorted_columns <= 0.2
    assert 1 - lengths.sum() / file_columns > 0.35


# ---- flags ----


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--batch-size", 0], "--batch-size: '0' given, expected a whole number at least 1"),
        (["--steps", 0], "--steps: '0'"),
        (["--steps", "x"], "--steps: 'x' given, expected a whole number"),
        (["--epochs", 1.5], "--epochs: '1.5'"),
        (["--max-length", 1], "--max-length: '1' given, expected a whole number at least 2"),
        (["--lora-rank", -1], "--lora-rank: '-1'"),
        (["--lr", 0], "--lr: '0' given, expected a number above 0"),
        (["--lr", "nan"], "--lr: 'nan'"),
        (["--lr", "inf"], "--lr: 'inf'"),
        (["--warmup", "1.5"], "--warmup: '1.5' given, expected a number at least 0 and below 1"),
        (["--seed", -3], "--seed: '-3'"),
        (["--seed", 2**63], "--seed: '9223372036854775808' given, .* below 9223372036854775808"),
        (["--save-every", 0], "--save-every: '0'"),
        (["--eval-every", -1], "--eval-every: '-1'"),
        (["--stop-after", 0], "--stop-after: '0'"),
        (["--lrr", 1], "--lrr, did you mean --lr; --help lists the flags"),
        (["--loss-type", "dro"], "--loss-type.*sigmoid"),
    ],
)
def test_a_wrong_flag_is_one_line(argv, message):
    """A rate of 0 or a batch of 0 fails hours later or never, and argparse prints forty lines of usage: one line instead that
    names the flag, the value and the range, before anything is loaded."""
    with pytest.raises(UserError, match=message) as caught:
        arguments(*argv)
    assert "\n" not in str(caught.value)


def test_help_is_short_and_help_all_is_not(capsys):
    """--help explains the stage's own flags and names the shared ones; --help-all explains both."""
    said = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as caught:
            arguments(flag)
        assert caught.value.code == 0
        said[flag] = capsys.readouterr().out
    for text in said.values():
        assert "python toy.py --data mine.jsonl" in text and "JSONL of rows" in text
    assert "--warmup" in said["--help"] and "needs the package wandb" not in said["--help"]
    assert "needs the package wandb" in " ".join(said["--help-all"].split())
    assert "(default 0.001 below 100 M parameters, else 1e-05, LoRA 0.0001)" in " ".join(said["--help-all"].split())  # fmt: skip


def test_the_rate_by_size():
    """Below 100 M parameters, above, and LoRA whatever the size."""
    rates = 1e-3, 1e-5, 1e-4
    small, large = (SimpleNamespace(num_parameters=lambda n=n: n) for n in (10**7, 10**8))
    assert [runs.default_lr(model, rates) for model in (small, large)] == [1e-3, 1e-5]
    small.lora_config = {}
    assert runs.default_lr(small, rates) == 1e-4


def test_the_plan(toy, capsys):
    """--steps; else --epochs passes, whose last batch may be short; else as many passes as make `least` steps."""
    for flags, least, steps in (
        ([], 1, 3),
        (["--epochs", 2], 1, 6),
        ([], 7, 9),
        (["--epochs", 2], 7, 6),
        (["--steps", 5], 7, 5),
    ):
        run = SimpleNamespace(args=arguments("--batch-size", 4, *flags))
        runs.Run.plan(run, 10, "rows", least)
        assert run.planned == steps
    assert "10 rows in batches of 4, 3 steps per epoch: 5 steps" in capsys.readouterr().out


# ---- schedule, optimiser, update ----

SCHEDULES = {
    "constant": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8],
    "cosine": [0.5, 1] + [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_by_hand(schedule, toy):
    """10 steps with a warm-up of .2: half the rate, the rate, then down from the full rate over 8 steps.

    The first step never has rate 0, and what is logged is the optimiser's rate.
    """
    expected = SCHEDULES[schedule]
    factors = [runs.lr_factor(step, 10, 0.2, schedule) for step in range(1, 11)]
    assert factors == pytest.approx(expected)
    assert runs.lr_factor(1, 1, 0.0, schedule) == 1, "one step without warm-up is a whole one"
    seen = []
    flags = ("--schedule", schedule, "--warmup", 0.2, "--steps", 10, "--stop-after", 4)
    toy.train(*flags, during=lambda run, step: seen.append(run))
    logged = [row["lr"] for row in toy.rows() if "lr" in row]
    assert logged == pytest.approx([1e-2 * factor for factor in expected[:4]])
    assert seen[0].optimizer.param_groups[0]["lr"] == logged[-1]


def test_one_optimiser_over_several_modules(toy, tmp_path):
    """Policy and critic share one AdamW without decay: each trained weight is in exactly one group, frozen ones in none, a
    fresh head has its own rate, and the schedule moves both rates."""
    run, policy = toy.opened("--schedule", "linear", "--warmup", 0)
    critic = common.load_reward_model(tiny_reward_model("gpt2", tmp_path, n_layer=1), tiny_tokenizer())  # fmt: skip
    critic.transformer.wpe.requires_grad_(False)
    run.plan(8, "rows")
    run.state = {"policy": policy, "kl": 0.1, "critic": critic}
    run.start(tiny_tokenizer(), 1e-4, head_lr=1e-3)
    assert run.model is policy
    groups = {id(w): g for g in run.optimizer.param_groups for w in g["params"]}
    assert sum(len(g["params"]) for g in run.optimizer.param_groups) == len(groups)
    named = [pair for module in (policy, critic) for pair in module.named_parameters()]
    assert any(not w.requires_grad for _, w in named) and policy.training and critic.training
    for name, weight in named:
        assert (id(weight) in groups) == weight.requires_grad, name
        if weight.requires_grad:
            assert groups[id(weight)]["base_lr"] == (1e-3 if name == "score.weight" else 1e-4), name
            assert groups[id(weight)]["weight_decay"] == 0
    run.step = 4  # of 6: half of the rate is left
    run.backward(sum(w.sum() for _, w in named))
    assert run.update(str)["lr"] == pytest.approx(5e-5)
    assert sorted(g["lr"] for g in run.optimizer.param_groups) == pytest.approx([5e-5, 5e-4])


def test_the_loss_is_summed_and_the_gradient_clipped(toy):
    """Two micro-batches of .25 and .75 of the loss are logged as the whole; the norm is the one before clipping at 1, after
    which a step by hand gives the same weights; nothing is left for the next step."""
    run, model = toy.opened("--schedule", "constant", "--warmup", 0)
    twin = common.load_policy(toy.model)
    run.plan(8, "rows")
    run.state, run.step = {"model": model}, 1
    run.start(tiny_tokenizer(), 1e-2)
    for part in (0.25, 0.75):
        run.backward(sum((w - 3).square().sum() for w in model.parameters()) * part)
    row = run.update(str)
    loss = sum((w - 3).square().sum() for w in twin.parameters())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), 1e-2, weight_decay=0.0).step()
    assert norm > 1 and row["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6) and row["skipped_steps"] == 0
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert run.loss == 0 and all(w.grad is None for w in model.parameters())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_names_the_rows(wrong, toy):
    """NaN in one batch is NaN in all weights: the run stops in front of the update and says which rows to look at; the
    checkpoint is of the step before."""

    def spoil(run, step):
        if step == 3:
            run.backward(next(run.model.parameters()).sum() * wrong)

    with pytest.raises(UserError, match="not finite; rows file:3. Lower --lr, or look at these"):
        toy.train(during=spoil)
    assert toy.steps() == [1, 2] and [r["step"] for r in toy.rows()] == [0, 1, 2]


def test_a_gradient_that_is_not_finite_stops_in_fp32(toy):
    """There no smaller scale can help."""

    def spoil(run, step):
        next(run.model.parameters()).grad[0, 0] = math.inf

    with pytest.raises(UserError, match="gradient norm (inf|nan): not finite; rows file:1"):
        toy.train(during=spoil)


class Scaler:
    """GradScaler's contract with exact numbers: the k-th step overflows if `overflows` holds k."""

    def __init__(self, overflows):
        self.overflows, self.k, self.size, self.did = overflows, 0, 2.0**16, []

    def scale(self, loss):
        return loss * self.size

    def unscale_(self, optimizer):
        self.k += 1
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad.div_(self.size)
                weight.grad.mul_(math.inf if self.k in self.overflows else 1)

    def step(self, optimizer):
        if self.k not in self.overflows:
            optimizer.step()

    def update(self):
        self.size *= 0.5 if self.k in self.overflows else 1
        self.did.append(self.size)

    def state_dict(self):
        return {"size": self.size}


def test_an_fp16_overflow_skips_the_step(toy):
    """Steps 2 and 3 of six overflow: they are counted, the weights stay, the scale is halved, and the others are made as if
    there were no scale at all."""
    fake, before = Scaler({2, 3}), {}

    def watch(run, step):
        run.scaler = fake  # from step 1 on; the first backward pass has had none
        if step == 1:
            for weight in run.model.parameters():
                weight.grad.mul_(fake.size)
        before[step] = next(run.model.parameters()).detach().clone()

    assert toy.train(during=watch) == 0
    assert [r["skipped_steps"] for r in toy.rows() if "lr" in r] == [0, 1, 1, 0, 0, 0]
    assert fake.did == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**14]
    assert torch.equal(before[2], before[3]) and torch.equal(before[3], before[4])
    assert not torch.equal(before[1], before[2]) and not torch.equal(before[4], before[5])
    losses = [r["loss"] for r in toy.rows() if "lr" in r]
    assert all(math.isfinite(loss) for loss in losses), "what is logged is not scaled"
    assert losses[0] < 100


@pytest.mark.parametrize("overflows, ends", [(range(2, 18), True), (range(2, 19), False)])
def test_seventeen_overflows_in_a_row_stop_the_run(overflows, ends, toy):
    """From 65536 seventeen halvings are a scale below 1, where overflow is not the cause. Sixteen are survived."""
    fake = Scaler(set(overflows))

    def use(run, step):
        if step == 1:
            for weight in run.model.parameters():
                weight.grad.mul_(fake.size)
        run.scaler = fake

    flags = ("--steps", 20, "--save-every", 50)
    if ends:
        assert toy.train(*flags, during=use) == 0
        assert sum(r.get("skipped_steps", 0) for r in toy.rows()) == 16
    else:
        with pytest.raises(UserError, match="gradient norm (inf|nan): not finite; rows file:18"):
            toy.train(*flags, during=use)


def test_the_scale_survives_a_resume(toy):
    """torch's own scaler under --dtype fp16: the halved scale is in the checkpoint."""

    def overflow(run, step):
        if step == 1:
            next(run.model.parameters()).grad[0, 0] = math.inf
        scales.append(run.scaler.get_scale())

    scales = []
    assert toy.train("--dtype", "fp16", "--stop-after", 2, during=overflow) == 0
    assert toy.train("--dtype", "fp16", "--resume", during=overflow) == 0
    assert scales == [2.0**16] + [2.0**15] * 5


def test_weights_that_are_not_finite_are_not_saved(toy, whole):
    """No further step would see what the last one broke; the folder keeps the model of the start."""

    def spoil(run, step):
        if step == 6:
            run.state["model"].transformer.wte.weight.data[0, 0] = math.nan
            run.optimizer.zero_grad()
            run.backward(run.state["model"].transformer.ln_f.weight.sum())

    with pytest.raises(UserError, match="--lr: the weights are no longer finite; lower it"):
        toy.train(during=spoil)
    common.load_policy(toy.out)


# ---- the run folder ----


def test_a_folder_in_use_is_refused_and_untouched(toy, tmp_path):
    """Without a flag nothing of a run is touched: neither its log nor its weights, nor the input it would overwrite."""
    assert toy.train() == 0
    content, model = contents(tmp_path), Path(toy.model)
    inside = write_rows(model / "rows.jsonl", [{"text": "a"}])
    content[Path(inside)] = Path(inside).read_bytes()
    with pytest.raises(UserError, match=r"holds a run; pass --resume .* --overwrite .*another --out"):  # fmt: skip
        toy.opened()
    with pytest.raises(UserError, match="--resume .* and --overwrite .*; pass one of them"):
        toy.opened("--resume", "--overwrite")
    for flags in ([], ["--overwrite"], ["--resume"]):
        with pytest.raises(UserError, match=f"the input {model} lies in it; write somewhere else"):
            toy.opened("--out", model, *flags)
        with pytest.raises(UserError, match=f"the input {inside} lies in it"):
            toy.opened("--out", model, "--model", "hub/name", "--data", inside, *flags)
        with pytest.raises(UserError, match="expected the name of a folder, not .*config.json"):
            toy.opened("--out", model / "config.json" / "x", *flags)
    assert content == contents(tmp_path)


def test_an_empty_name_is_no_folder(toy, tmp_path, monkeypatch):
    """`--out "$OUT"` with OUT unset: Path("") is the working folder, and a model would be written among the scripts."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="expected the name of a folder"):
        toy.opened("--out", "")


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_a_model_that_is_no_run_is_spared(flag, toy, tmp_path):
    """`--out my-model --overwrite` with a mistyped name would delete weights that no run of ours made: without an args.json
    the folder is somebody's own. A folder with other things in it is free to use, but for --resume."""
    mine = tiny_model("gpt2", tmp_path, n_layer=1)
    content = contents(tmp_path)
    with pytest.raises(UserError, match="holds config.json but no args.json, so it can be neither"):
        toy.opened("--out", mine, flag)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    if flag == "--resume":
        for name in ("notes", "none"):
            with pytest.raises(UserError, match=f"{name}: holds no run"):
                toy.opened("--out", tmp_path / name, flag)
    else:
        toy.opened("--out", tmp_path / "notes", flag)
    assert content == {k: v for k, v in contents(tmp_path).items() if k.name != "notes.txt"}


def test_overwrite_removes_the_run_and_nothing_else(toy, whole):
    """--overwrite on `--out .` must not be `rm -r`: of a folder with a run and a user's own files exactly the run goes. With
    it the tokenizer: another model's template would stay in its file."""
    toy.train()
    (toy.out / "rollouts.jsonl").write_text("old")
    old = ["adapter/old", "checkpoint/old", "checkpoint/reference.pt", "added_tokens.json"]
    old += ["merges.txt", "additional_chat_templates/old.jinja"]
    mine = ["notes.txt", "thesis/chapter.tex", "report.json", "data.jsonl", "model.safetensors.bak", ".env", ".git/config"]  # fmt: skip
    for name in [*old, *mine]:
        (toy.out / name).parent.mkdir(exist_ok=True)
        (toy.out / name).write_text("mine")
    seen = []
    watch = lambda run, step: seen.extend(contents(toy.out)) if step == 1 else None  # noqa: E731
    assert toy.train("--overwrite", "--seed", 5, during=watch) == 0
    now = {str(p.relative_to(toy.out)) for p in seen}
    assert all((toy.out / name).read_text() == "mine" for name in mine)
    new = {"args.json", "metrics.jsonl", "samples.jsonl", "config.json", "generation_config.json", "model.safetensors"}  # fmt: skip
    new |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert now - set(mine) - {"special_tokens_map.json"} == new, "as the first step found it"
    assert json.loads((toy.out / "args.json").read_text())["args"]["seed"] == 5
    assert [r["step"] for r in toy.rows()] == [0, 1, 2, 3, 4, 5, 6, 6]


def test_args_json_says_what_made_the_run(toy):
    """Stage, resolved arguments, versions, and a hash of each input: what a repetition needs."""
    toy.train()
    record = json.loads((toy.out / "args.json").read_text())
    assert record["stage"] == "toy" and record["args"]["lr"] == 1e-2
    assert record["args"]["micro_tokens"] == 1024
    assert {"torch", "transformers", "tokenizers", "numpy"} == record["versions"].keys()
    assert record["sha256"].keys() == {toy.data, toy.model}
    assert record["sha256"][toy.model] == runs.fingerprint(toy.model)
    assert all(len(h) == 64 for h in record["sha256"].values())


# ---- resume ----


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--seed", 1], "--seed was 0, is 1"),
        (["--lr", 2e-4], "--lr was 0.01, is 0.0002"),
        (["--batch-size", 16], "--batch-size was 2, is 16"),
        (["--loss-type", "ipo"], "--loss-type was 'sigmoid', is 'ipo'"),
        (["--model", "other"], "--model was .*, is 'other'"),
        (["--data", "other.jsonl"], "--data was"),
        (["--gold", "g.py:f"], "--gold was None, is 'g.py:f'"),
        (["--micro-tokens", 7], "--micro-tokens was 1024, is 7"),
        (["--seed", 1, "--lora-rank", 4], "--seed was 0, is 1; --lora-rank|--lora-rank was 0, is 4; --seed"),
    ],
)  # fmt: skip
def test_resume_refuses_another_run_by_name(flags, message, toy):
    """Resumed with another seed or rate, a run silently becomes one that nobody can repeat: what differs is named."""
    toy.train("--stop-after", 1)
    before = contents(toy.out)
    with pytest.raises(UserError, match="--resume: not the run in") as caught:
        toy.opened("--resume", *flags)
    pytest.raises(UserError, toy.opened, "--resume", *flags).match(message)
    assert "\n" not in str(caught.value) and contents(toy.out) == before


def test_resume_refuses_changed_data_and_weights(toy):
    """The same names with other contents: one byte of the data, one weight of the model, another stage."""
    toy.train("--stop-after", 1)
    toy.opened("--resume")
    with pytest.raises(UserError, match="not the run in .*: it was made by toy.py"):
        toy.opened("--resume", stage="reward_train")
    for file, message in ((Path(toy.data), "rows.jsonl has changed"), (Path(toy.model) / "model.safetensors", "gpt2-0 has changed")):  # fmt: skip
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            toy.opened("--resume")
        content[-3] ^= 1
        file.write_bytes(content)
    toy.opened("--resume")


@pytest.mark.parametrize("text", ["[]", "{}", '{"args": 3, "sha256": {}}', "not json", "\udcff"])
def test_resume_of_a_damaged_args_json(text, toy):
    """One line instead of a traceback."""
    toy.train("--stop-after", 1)
    (toy.out / "args.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match="args.json is not the args.json of a run"):
        toy.opened("--resume")


def test_what_was_left_to_a_default_stays_what_it_was(toy, monkeypatch):
    """On another machine the default of --micro-tokens may be another, and it changes the order of sums; so may a default rate
    in a later version. A resume that does not name them takes those of the run."""
    toy.train("--stop-after", 2)
    monkeypatch.setattr(runs.parallel, "micro_tokens", lambda run: 99)
    del toy.argv[toy.argv.index("--lr") : toy.argv.index("--lr") + 2]
    run, _ = toy.opened("--resume")
    assert (run.args.micro_tokens, run.args.lr) == (1024, 1e-2)
    run, _ = toy.opened("--overwrite")
    assert (run.args.micro_tokens, run.args.lr) == (99, None)


def test_the_plan_of_a_resume_without_steps_stays(toy):
    """A resume that leaves --steps out must not silently follow another schedule to another end."""
    toy.train("--stop-after", 2)
    del toy.argv[toy.argv.index("--steps") : toy.argv.index("--steps") + 2]
    assert toy.train("--resume") == 0
    assert toy.rows()[-1]["step"] == 6


def test_resume_allows_what_changes_no_weight(toy, whole):
    """How often to save and evaluate, when to stop, and a longer plan are the user's to change; the rest of args.json stays."""
    toy.train("--stop-after", 2)
    before = json.loads((toy.out / "args.json").read_text())
    toy.train("--resume", "--save-every", 3, "--eval-every", 1, "--stop-after", 4, "--steps", 60)
    after = json.loads((toy.out / "args.json").read_text())
    changed = {k for k, v in after["args"].items() if before["args"][k] != v}
    assert changed == {"save_every", "eval_every", "steps", "stop_after", "resume"}
    assert {**before, "args": 0} == {**after, "args": 0}
    assert toy.steps() == [2, 4] or toy.steps() == [3, 4]
    assert [r["step"] for r in toy.rows()] == [0, 1, 2, 3, 3, 4, 4]
    assert toy.train("--resume") == 0, "back to the plan of before"


def test_a_resumed_run_is_the_run_in_one_go(toy, whole, capsys):
    """Weights, moments, schedule, log, samples, and whatever else lies in `state`: numbers, lists, tensors."""
    assert toy.train("--stop-after", 2) == 0
    assert "stopped after step 2 of 6" in capsys.readouterr().out
    assert toy.train("--resume", "--stop-after", 2) == 0, "already there: on to the end"
    assert "resumed at step 2" in capsys.readouterr().out
    assert toy.outcome() == whole
    state = toy.run.state
    assert state["sum"] == 21 and state["history"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert state["history"]["last"].tolist() == [6, 0.5]
    assert toy.train("--resume") == 0, "a run that has ended: only its end is repeated"
    assert toy.outcome() == whole and toy.run.state["sum"] == 21
    longer = ("--resume", "--steps", 8)
    assert toy.train(*longer) == 0 and toy.rows()[-1]["step"] == 8
    with pytest.raises(UserError, match="--steps 6: this run is at step 8 already"):
        toy.train("--resume")


def test_once_is_computed_once(toy):
    """The reference pass over all pairs is made in the first session; a resumed one reads its bits. Nothing is written before
    the folder is opened, and a run that replaces another computes its own."""
    made = []

    def compute():
        made.append(torch.tensor([0.1, len(made)]))
        return made[-1]

    def session(*flags):
        run, model = toy.opened(*flags)
        run.plan(8, "rows")
        value = run.once("reference", compute)
        run.state = {"model": model}
        run.start(tiny_tokenizer(), 1e-2)
        here = (toy.out / "checkpoint" / "reference.pt").exists()
        for _ in run.steps():
            run.backward(model.transformer.wpe.weight.sum())
            run.log(run.update(str))
        run.finish("")
        return value, here

    value, here = session("--stop-after", 2)
    assert torch.equal(value, made[0]) and not here and len(made) == 1
    value, here = session("--resume")
    assert torch.equal(value, made[0]) and here and len(made) == 1
    value, _ = session("--overwrite")
    assert len(made) == 2 and torch.equal(value, made[1])
    kept = torch.load(toy.out / "checkpoint" / "reference.pt", weights_only=True)
    assert torch.equal(kept, made[1])


# ---- logs ----

TORN = (b"", b'{"step": 4, "lo', b'{"step": 2}', b"\x00\x00\x00", '{"step": 4, "answer": "é'.encode()[:-1])  # fmt: skip


@pytest.mark.parametrize("tail", TORN)
def test_a_log_is_cut_back_to_the_checkpoint(tail, toy, whole):
    """Rows after the checkpoint would stand twice in the log, and a line torn by a kill, in the middle of a character even,
    would break every reader. The checkpoint is of step 2; steps 3 and 4 were logged, and a half line."""

    def kill(run, step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.train("--save-every", 2, "--eval-every", 3, during=kill)
    shutil.rmtree(toy.out / "checkpoint" / "step-0000004")
    assert [r["step"] for r in toy.rows()] == [0, 1, 2, 3, 3, 4]
    for name in ("metrics", "samples"):
        with open(toy.out / f"{name}.jsonl", "ab") as file:
            file.write(tail)
    assert toy.train("--resume") == 0
    assert toy.outcome() == whole


def test_a_run_without_a_checkpoint_begins_its_log_anew(toy, whole, capsys):
    """Killed before the first checkpoint: --resume starts from step 0, with one row for step 0 in the log and not two."""

    def kill(run, step):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy.train("--save-every", 100, during=kill)
    assert toy.steps() == [] and len(toy.rows()) == 2
    assert toy.train("--resume") == 0
    assert "resumed at step 0" in capsys.readouterr().out
    assert toy.outcome() == whole


def test_rows_are_written_at_once(toy):
    """A log that is flushed at the end shows nothing of a run that was killed. NaN and inf are null; rows from before the
    folder is opened wait, and stand in front."""
    seen = []

    def read(run, step):
        run.write("rollouts.jsonl", [{"step": step, "x": math.nan}])
        seen.append((len(toy.rows()), toy.rows("rollouts")[-1]))

    assert toy.train(during=read) == 0
    assert seen == [(step, {"step": step, "x": None}) for step in range(1, 7)]
    first, second, *_ = toy.rows()
    assert first["step"] == 0 and first["eval/loss"] == 2.0 and first["val/gold"] is None
    assert second["tokens_per_s"] > 0 and second["time_s"] >= 0 and second["peak_mem_mb"] > 10
    assert toy.rows("samples") == [{"step": s, "prompt": "p", "answer": f"é {s}"} for s in (0, 6)]


def test_two_writers_tear_no_line(tmp_path):
    """Two processes that append to one file (a run and its evaluation) must not write into each other's lines.

    2 writers of 300 rows of up to 9 000 characters: 600 whole rows, each writer's in order.
    """
    path, children = tmp_path / "log.jsonl", []
    for writer in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for i in range(300):
                    row = {"writer": writer, "i": i, "text": chr(97 + writer) * (30 * i)}
                    files.write_jsonl(path, [row], append=True)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(c, 0)[1] for c in children] == [0, 0]
    rows = list(files.read_jsonl(path))
    assert len(rows) == 600 and Counter(r["writer"] for r in rows) == {0: 300, 1: 300}
    for writer in range(2):
        assert [r["i"] for r in rows if r["writer"] == writer] == list(range(300))


def test_the_last_lines_show_before_and_after(toy, capsys):
    """Each headline number that there is, and one prompt with its answer before and after."""
    toy.train()
    said = capsys.readouterr().out
    for words in (
        "model      0.03 M of 0.03 M weights are trained, lr 0.01, on cpu in torch.float32",
        "eval/loss before 2.0000 after 0.1667",
        "before é 0",
        "after é 6",
        "next: python evaluate.py",
    ):
        assert words in " ".join(said.split()) or words in said
    assert "val/gold" not in said, "not measured here"


@pytest.mark.parametrize("end", [[], ["--stop-after", 2]])
def test_wandb_hears_of_each_row_and_of_the_end(end, toy, monkeypatch):
    """wandb ends a run in a hook of Python's own end, which a process under torchrun leaves out (`files.command`): said by
    name. Without the package one line says so before anything is loaded."""
    calls = []
    run = SimpleNamespace(log=lambda row, step: calls.append(step), finish=lambda: calls.append(-1))
    fake = SimpleNamespace(init=lambda **_: run, __spec__=ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert toy.train("--wandb-project", "mine", *end) == 0
    assert calls == ([0, 1, 2, -1] if end else [0, 1, 2, 3, 4, 5, 6, 6, -1])
    monkeypatch.setattr(runs, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--wandb-project: .*pip install wandb"):
        toy.opened("--wandb-project", "mine", "--overwrite")


# ---- checkpoints ----


def test_two_checkpoints_are_kept_and_the_newest_is_loaded(toy, capsys):
    """Steps are sorted as numbers: as text, step-9 would be newer than step-10."""
    assert toy.train("--steps", 12, "--stop-after", 10) == 0
    assert toy.steps() == [9, 10]
    assert sorted(p.name for p in (toy.out / "checkpoint").iterdir()) == ["step-0000009", "step-0000010"]  # fmt: skip
    toy.train("--steps", 12, "--resume", "--stop-after", 11)
    assert "resumed at step 10" in capsys.readouterr().out
    toy.train("--steps", 12, "--overwrite", "--stop-after", 1)
    assert toy.steps() == [1], "a new run does not look at old checkpoints"


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "missing", "text"])
def test_a_damaged_checkpoint_is_named(damage, toy, whole):
    """A silent start from an older step, or from 0, would cut the log. One line says which folder to delete to resume from the
    one before; then the run ends as if nothing had happened."""
    toy.train("--stop-after", 4)
    file = toy.out / "checkpoint" / "step-0000004" / "state.pt"
    content = file.read_bytes()
    damaged = {"truncated": content[: len(content) // 2], "empty": b"", "garbage": b"\x80\x02x" * 100, "text": b"{}"}  # fmt: skip
    file.unlink() if damage == "missing" else file.write_bytes(damaged[damage])
    before = contents(toy.out)
    with pytest.raises(UserError, match="step-0000004 cannot be read .*; delete this folder") as e:
        toy.train("--resume")
    assert "\n" not in str(e.value) and contents(toy.out) == before
    shutil.rmtree(file.parent)
    assert toy.train("--resume") == 0 and toy.outcome() == whole


def test_a_missing_checkpoint_folder_is_no_start_from_0(toy):
    """Somebody removed it: to start again in place of the trained weights takes an --overwrite."""
    toy.train("--stop-after", 4)
    shutil.rmtree(toy.out / "checkpoint")
    before = contents(toy.out)
    with pytest.raises(UserError, match="checkpoint is gone; pass --overwrite"):
        toy.train("--resume")
    assert contents(toy.out) == before


def test_other_weights_are_refused(toy):
    """A checkpoint of another architecture, loaded as far as it fits, is neither run."""
    toy.train("--stop-after", 2)
    run, _ = toy.opened("--resume")
    run.plan(8, "rows")
    run.state = {"model": common.load_policy(toy.model, lora_rank=2)}
    with pytest.raises(UserError, match="holds other weights than this model has"):
        run.start(tiny_tokenizer(), 1e-2)


class Bomb:
    """Unpickled, it makes a folder: what any pickle from a stranger may do."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


def test_a_pickled_object_is_refused_and_never_run(toy, tmp_path, monkeypatch):
    """`torch.load` without `weights_only` runs code from the file."""
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    toy.train("--stop-after", 2)
    torch.save({"step": 2, "state": Bomb()}, toy.out / "checkpoint" / "step-0000002" / "state.pt")
    with pytest.raises(UserError, match="step-0000002 cannot be read"):
        toy.train("--resume")
    assert not (tmp_path / "exploded").exists()


def failing(error):
    def call(*args, **kwargs):
        raise error

    return call


def said_by(capsys, act):
    """What the command prints on stderr for act(), which must fail as what the user can fix."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        files.command(act)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "where, name, error",
    [
        (runs, "write_jsonl", OSError(28, "No space left on device")),
        (runs.Path, "mkdir", PermissionError(13, "Permission denied")),
        (runs, "write_json", OSError(30, "Read-only file system")),
        (runs, "save_model", OSError(28, "No space left on device")),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_line(where, name, error, toy, monkeypatch, capsys):
    """A full disk or a read-only folder: the reason, and no traceback."""
    monkeypatch.setattr(where, name, failing(error))
    said = said_by(capsys, toy.train)
    assert said.startswith("error: ") and error.strerror in said and said.count("\n") == 1


def test_a_full_disk_while_a_checkpoint_is_written(toy, whole, monkeypatch, capsys):
    """torch.save hides the OSError behind a RuntimeError of its own; after making room the run goes on. A RuntimeError of
    torch itself is a bug and stays one."""
    real = torch.save

    def full(state, file):
        if isinstance(state, dict) and state["step"] == 4:
            try:
                raise OSError(28, "No space left on device")
            except OSError:
                raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904
        real(state, file)

    monkeypatch.setattr(torch, "save", full)
    assert "No space left on device" in said_by(capsys, toy.train)
    assert toy.steps() == [2, 3]
    monkeypatch.setattr(torch, "save", failing(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        files.command(lambda: toy.train("--resume"))
    monkeypatch.setattr(torch, "save", real)
    assert toy.train("--resume") == 0 and toy.outcome() == whole


# ---- killed at each change of the disk ----

CALLS = [(os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (os, "rmdir"), (os, "unlink"), (os, "chmod")]  # fmt: skip


def killed_at(number, act):
    """Run act() in a child that dies by SIGKILL at its `number`-th change of the disk; True if it lived to the end."""
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

    code = 1
    try:
        for module, name in CALLS:
            setattr(module, name, counted(getattr(module, name)))
        plain = torch.save

        def in_halves(state, file):  # the file is torn in its middle, then whole but not flushed
            plain(state, buffer := io.BytesIO())
            content = buffer.getvalue()
            tick()
            file.write(content[: len(content) // 2])
            file.flush()
            tick()
            file.write(content[len(content) // 2 :])
            tick()

        torch.save = in_halves
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def every_kill(act, check, prepare):
    """Kill act() at its first, second, … change of the disk, each time on a fresh folder; returns how many there were."""
    number = 1
    while True:
        prepare()
        lived = killed_at(number, act)
        check(lived)
        if lived:
            return number - 1
        number += 1


def restored(folder, source):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)


def test_a_kill_while_a_checkpoint_is_written(toy, tmp_path, whole):
    """At no instant may the newest thing that looks like a checkpoint be half of one.

    Steps 2 and 3 are there, 4 is written and 2 removed, killed at each disk operation: the newest is 3 or 4, whole; the run
    that resumes from it ends in the same bits, and leaves nothing behind of what the kill had begun.
    """
    toy.train("--stop-after", 3)
    shutil.copytree(toy.out, tmp_path / "three")
    run, model = toy.opened("--resume")
    run.plan(8, "rows")
    run.state = {"model": model, "sum": 6, "history": {"steps": [1, 2, 3], "last": torch.ones(2)}}
    run.start(tiny_tokenizer(), 1e-2)
    run.step, seen = 4, Counter()

    def check(lived):
        steps = toy.steps()
        seen[steps[-1]] += 1
        assert steps in ([3, 4],) if lived else steps in ([2, 3], [2, 3, 4], [3, 4])
        for step in steps:
            file = toy.out / "checkpoint" / f"step-{step:07d}" / "state.pt"
            assert torch.load(file, weights_only=True)["step"] == step

    def prepare():
        restored(toy.out, tmp_path / "three")

    assert every_kill(run._save_checkpoint, check, prepare) >= 8
    assert seen[3] >= 5 and seen[4] >= 2, "killed before and after the instant that counts"
    prepare()
    assert not killed_at(4, run._save_checkpoint), "killed while state.pt is written"
    assert toy.train("--resume") == 0 and toy.outcome() == whole
    assert [p.name for p in toy.out.rglob(".*")] == []


def test_a_kill_while_a_run_is_opened_or_replaced(toy, tmp_path):
    """Killed between the files of the old run that --overwrite removes: what is left can be replaced by the same command,
    and never looks like a run that can be resumed with the new arguments. Nothing of the kill is left over."""
    toy.train("--stop-after", 2)
    shutil.copytree(toy.out, tmp_path / "old")

    def act():
        run, model = toy.opened("--overwrite", "--seed", 5)
        run.plan(8, "rows")
        run.kept = {"reference": torch.ones(3)}
        run.state = {"model": model}
        run.start(tiny_tokenizer(), 1e-2)
        run._open()

    def check(lived):
        replaced = json.loads((toy.out / "args.json").read_text())["args"]["seed"] == 5
        assert replaced or not lived
        if replaced:
            assert toy.steps() == [] and not (toy.out / "metrics.jsonl").exists()
            toy.opened("--resume", "--seed", 5)
        else:
            with pytest.raises(UserError, match="--seed was 0, is 5"):
                toy.opened("--resume", "--seed", 5)
        act()
        assert (toy.out / "checkpoint" / "reference.pt").is_file()
        assert [p.name for p in toy.out.rglob(".*")] == []

    assert every_kill(act, check, lambda: restored(toy.out, tmp_path / "old")) >= 12


def test_a_kill_while_a_model_is_saved(tmp_path):
    """A folder whose weights are of one moment and whose file is half written opens nowhere.

    The weights change from 1 to 2 while the folder is rewritten, killed at each disk operation: it opens each time, with
    all weights at 1 or all at 2.
    """
    folder = tmp_path / "out"
    tokenizer = tiny_tokenizer()
    model = common.load_policy(tiny_model("gpt2", tmp_path, n_layer=1))

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


def test_a_kill_while_a_file_is_replaced(tmp_path):
    """args.json and rewritten logs are read by the next start: the old content or the new, never half of it."""
    path = tmp_path / "rows.jsonl"
    old, new = [{"a": 1}] * 3, [{"b": 2}] * 5

    def check(lived):
        assert list(files.read_jsonl(path)) in ([new] if lived else [old, new])

    assert every_kill(lambda: files.write_jsonl(path, new), check, lambda: files.write_jsonl(path, old)) >= 3  # fmt: skip


# ---- stopping ----


def test_a_checkpoint_is_due(toy):
    """Every so many steps, at --stop-after, at the last one; at no other step."""
    seen = {}
    watch = lambda run, step: seen.update({step: toy.steps()})  # noqa: E731
    flags = ("--steps", 8, "--save-every", 3)
    assert toy.train(*flags, "--stop-after", 5, during=watch) == 0
    assert seen[4] == [3] and toy.steps() == [3, 5]
    assert toy.train(*flags, "--resume", during=watch) == 0
    assert seen[7] == [5, 6] and toy.steps() == [6, 8]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_finishes_the_step(number, toy, whole, capfd):
    """Ctrl-C in the middle of a step must not lose the step: it ends, with a checkpoint and a model, the exit code is
    128 + signal so that a script does not take it for success, and --resume goes on."""

    def press(run, step):
        if step == 3:
            os.kill(os.getpid(), number)

    assert toy.train("--save-every", 100, during=press) == 128 + number
    out, err = capfd.readouterr()
    assert "stopping after this step; --resume continues" in err
    assert f"stopped after step 3 of 6; its weights are in {toy.out}" in out
    assert toy.steps() == [3] and toy.rows()[-1]["step"] == 3
    common.load_policy(toy.out)
    assert toy.train("--resume") == 0 and toy.outcome() == whole


def test_a_second_ctrl_c_does_not_wait(toy):
    """Who presses it twice means it. The handlers of before are back: a notebook calls main() and goes on."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def press(run, step):
        assert signal.getsignal(signal.SIGINT) is not before[0]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        toy.train(during=press)
    toy.train("--resume")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_handlers_of_before_come_back_however_it_ends():
    """Also after an error, and outside the main thread there is nothing to catch."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(UserError), runs.stop_signals() as caught:
        assert caught == [0] and signal.getsignal(signal.SIGTERM) is not before[1]
        raise UserError("a NaN")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_errors_of_the_user_end_in_one_line_and_status_2(capsys):
    """A traceback for a mistyped path frightens and hides the path. Other errors are bugs and keep their traceback."""

    def main(error):
        if error:
            raise error

    for error, code, text in (
        (UserError("--pairs x: no such file"), 2, "error: --pairs x: no such file\n"),
        (OSError(28, "No space left on device"), 2, "No space left"),
        (KeyboardInterrupt(), 130, ""),
        (None, None, ""),
    ):
        with pytest.raises(SystemExit) as caught:
            files.command(lambda e=error: main(e))
        assert caught.value.code == code and text in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        files.command(lambda: 1 / 0)


# ---- fingerprints ----


def test_a_large_file_is_not_known_by_its_ends_alone(tmp_path):
    """A fine-tune that moves some layers only has the first and the last MiB of its start: of 300 MiB, samples all over.

    256 samples of 1 MiB stand 1.17 MiB apart; one byte of the hundredth is changed.
    """
    file, size = tmp_path / "model.bin", 300 * 2**20
    with open(file, "wb") as handle:
        handle.truncate(size)
    before = runs.fingerprint(file)
    with open(file, "r+b") as handle:
        handle.seek(100 * (size // 256))
        handle.write(b"x")
    assert runs.fingerprint(file) != before


def test_a_folder_is_known_by_its_weights_configs_and_base(tmp_path):
    """The log of a run may grow and a report may be added; a config, a template, a weight, the base of an adapter may not
    change."""
    folder = Path(tiny_model("gpt2", tmp_path, n_layer=1))
    before = runs.fingerprint(folder)
    for name in ("args.json", "report.json", "metrics.jsonl", "notes.txt"):
        (folder / name).write_text("{}")
    assert runs.fingerprint(folder) == before
    (folder / "chat_template.jinja").write_text("another")
    changed = runs.fingerprint(folder)
    assert changed != before
    shutil.copy(folder / "config.json", folder / "other.json")
    assert runs.fingerprint(folder) not in (before, changed)
    model = common.load_policy(str(folder), lora_rank=2)
    common.save_model(model, tiny_tokenizer(), tmp_path / "tuned", adapter_only=True)
    adapter = tmp_path / "tuned" / "adapter"
    before = runs.fingerprint(adapter)
    (folder / "other.json").write_text("3")
    assert runs.fingerprint(adapter) != before, "its base has changed"
