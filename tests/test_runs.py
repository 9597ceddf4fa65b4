"""parts/runs.py: step, log, checkpoint, resume, stop; with a toy trainer, and dpo.py on the base."""

import io
import itertools
import math
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import common
import dpo
from conftest import REPO
from parts import files, rollouts, runs
from parts.files import UserError
from tiny import error_of, read_json, table, tiny_model, words, write_rows

if sys.platform != "linux":
    pytest.skip("forks and signals as on Linux", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("quiet_process")
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


# ---- a toy trainer: six steps towards weights equal to the number of the step ----


class Toy:
    def __init__(self, folder, model, tokenizer):
        self.out, self.model, self.tokenizer = folder / "run", model, tokenizer
        self.data = write_rows(folder / "rows.jsonl", [{"text": "a"}, {"text": "b"}])
        self.argv = ["--out", self.out, "--data", self.data, "--model", model]
        self.argv += words("--lr 1e-2 --steps 6 --save-every 1")

    def opened(self, *given, stage="toy"):
        parser = files.trainer_parser("toy.py", "A toy.", "runs/toy", (1e-3, 1e-5, 1e-4))
        parser.add_argument("--data", nargs="+")
        parser.add_argument("--gold")
        parser.add_argument("--target", type=float)
        args = parser.parse_args(words(*self.argv, *given))
        return runs.Run(stage, args, ("loss", "nothing"), ("eval/loss", "val/gold"))

    def policy(self):
        return common.Policy(
            common.load_model(self.model, "cpu", torch.float32, trainable=True), torch.float32
        )

    def train(self, *given, during=None, encoded=(1, 2)):
        run, policy = self.opened(*given), self.policy()
        self.run = run
        optimizer = run.start({"policy": policy}, self.tokenizer, (1, 2, 3), 4, [encoded])
        rollouts.go_on(run)
        run.state.setdefault("steps", [])
        run.state.setdefault("last", torch.zeros(2))
        if run.step == 0:
            run.evaluation({"eval/loss": 2.0, "val/gold": None}, [{"prompt": "p", "answer": "é 0"}])
        for step in run.steps():
            optimizer.zero_grad()
            loss = sum((w - step).square().mean() for w in policy.parameters())
            run.scaler.scale(loss).backward()
            extra = during(run, step) if during else None
            run.state["steps"].append(step)
            run.state["last"] = torch.tensor([step, 0.5])
            total = loss.item() if extra is None else extra
            total, norm = run.clip(total, [f"file:{step}"])
            lr = run.set_lr(step)
            run.scaler.step(optimizer)
            run.scaler.update()
            run.log({"loss": total, "lr": lr, "grad_norm": norm, "tokens": 50})
            if run.evaluates(step):
                samples = [{"prompt": "p", "answer": f"é {step}"}]
                run.evaluation({"eval/loss": 1 / step}, samples)
            if run.args.target and step >= run.args.target:
                run.state["ended"] = "target_reached"
        return run.finish("evaluate.py")

    def rows(self, name="metrics"):
        return list(files.read_jsonl(self.out / f"{name}.jsonl"))

    def numbers(self):
        return [row["step"] for row in self.rows()]

    def steps(self):
        return sorted(int(p.stem[-7:]) for p in (self.out / "checkpoint").glob("step-*"))

    def outcome(self):
        return outcome(self.out)

    def refuses(self, message, *given, **how):
        before = contents(self.out.parent)
        assert re.search(message, error_of(lambda: self.opened(*given, **how)))
        assert contents(self.out.parent) == before


def outcome(out):
    """Weights, log, samples."""
    assert [*out.rglob(".*")] == [], "something is left behind"
    rows, samples = (list(files.read_jsonl(out / f"{x}.jsonl")) for x in ("metrics", "samples"))
    rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in rows]
    return (out / "model.safetensors").read_bytes(), rows, samples


def contents(folder):
    """{path: bytes, or None of a folder}."""
    return {p: p.read_bytes() if p.is_file() else None for p in Path(folder).rglob("*")}


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


# ---- rates, optimiser ----


def test_the_rate():
    """Two of ten steps rise, eight fall."""
    for schedule, falling in (
        ("constant", lambda done: 1),
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
    ):
        factors = [runs.lr_factor(step, 10, 0.2, schedule) for step in range(1, 11)]
        assert factors == pytest.approx([0.5, 1, *(falling(i / 8) for i in range(8))])
        assert runs.lr_factor(1, 1, 0.0, schedule) == 1, "one step without warm-up is a whole one"


@pytest.mark.parametrize(
    "given, per_epoch, planned, lr",
    [("", 4, 24, 1), ("", 3, 24, 1), ("", 25, 25, 1), ("--epochs 2", 3, 6, 1), ("--steps 5", 3, 5, 1),
     ("--lora-rank 2", 4, 24, 3), ("--lr 0.5", 4, 24, 0.5)],
)  # fmt: skip
def test_plan_and_default_rate(given, per_epoch, planned, lr, toy, folders):
    """Without flags: whole passes that make 24 steps; the rate by size and LoRA."""
    toy.argv = ["--out", toy.out, "--model", folders["llama"]]
    run = toy.opened(given)
    run.start({"policy": toy.policy()}, toy.tokenizer, (1, 2, 3), per_epoch, [[1]])
    assert (run.planned, run.args.lr) == (planned, lr)


def norm(module):
    grads = [w.grad for w in module.parameters() if w.grad is not None]
    return sum(grad.square().sum() for grad in grads).sqrt().item()


def test_one_optimiser_over_several_modules(toy):
    """Each clipped on its own: clipping the first alone would leave PPO's critic with gradients of
    any size. A fresh head has a rate of its own; AdamW is the fused one, without decay."""
    run, policy = toy.opened("--schedule linear --warmup 0.34"), toy.policy()
    critic = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    critic[0].bias.requires_grad_(False)
    optimizer = run.start({"policy": policy, "critic": critic}, toy.tokenizer, (1, 2, 3), 4, [[1]],
                          own_lr={critic[1]: 1e-1})  # fmt: skip
    weights = {*policy.parameters(), *critic.parameters()} - {critic[0].bias}
    rates = dict.fromkeys(weights, 1e-2) | dict.fromkeys(critic[1].parameters(), 1e-1)
    groups = optimizer.param_groups
    assert {w: group["base_lr"] for group in groups for w in group["params"]} == rates
    assert sum(len(group["params"]) for group in groups) == len(rates)
    assert {(group["weight_decay"], group["fused"]) for group in groups} == {(0, True)}
    (100 * sum(w.sum() for w in weights)).backward()
    before = norm(policy)
    _, grad_norm = run.clip(0.0, [])
    assert grad_norm == pytest.approx(before) and before > 1
    assert [norm(policy), norm(critic)] == pytest.approx([1, 1], abs=1e-4)
    # step 5 of 6, of which the first 3 rise: two thirds are left
    assert run.set_lr(5) == pytest.approx(2e-2 / 3)
    assert sorted(group["lr"] for group in groups) == pytest.approx([2e-2 / 3, 2e-1 / 3])


def test_what_is_not_finite_stops_the_run(toy):
    """NaN in one batch is NaN in all weights: stopped in front of the update, the rows named."""

    def interfere(kind):
        def during(run, step):
            if kind == "loss" and step == 3:
                return math.nan
            if kind == "gradient":
                next(run.policy.parameters()).grad[0, 0] = math.inf

        return during

    for kind, message, logged in table("""
        loss | loss nan.* not finite; rows .*file:3.*--lr | [0, 1, 2]
        gradient | gradient norm [infa]+: not finite; rows .*file:1 | [0]
    """):
        with pytest.raises(UserError, match=message):
            toy.train("--overwrite", during=interfere(kind))
        assert toy.numbers() == logged and toy.steps() == sorted({*logged[1:]})[-2:]
        assert not (toy.out / "config.json").exists(), "no model before the run has ended"
    assert "cannot be loaded" in error_of(common.load_config, str(toy.out))


def test_an_fp16_overflow_skips_the_step(toy):
    """Steps 2 and 3 overflow and halve the scale; of 1024 the 11th in a row is no overflow."""
    scales, weights = [], []

    def overflow(*at):
        def spoil(run, step):
            weight = next(run.policy.parameters())
            if step in at:
                weight.grad[0, 0] = math.inf
            weights.append(weight.detach().clone())
            scales.append(run.scaler.get_scale())

        return spoil

    given = "--dtype fp16 --steps 6"
    assert toy.train(given, "--stop-after 4", during=overflow(2, 3)) == 0
    assert toy.train(given, "--resume", during=overflow(5)) == 0
    assert scales == [2.0**n for n in (10, 10, 9, 8, 8, 7)], "the scale is resumed, too"
    assert [torch.equal(*pair) for pair in itertools.pairwise(weights)] == [0, 1, 1, 0, 1]
    losses = [row["loss"] for row in toy.rows() if "lr" in row]
    assert len(losses) == 6 and max(losses) < 1000, "what is logged is not scaled"
    given = "--dtype fp16 --overwrite --steps 20 --save-every 50"
    assert toy.train(given, during=overflow(*range(2, 12))) == 0
    with pytest.raises(UserError, match="gradient norm (inf|nan): not finite; rows .*file:12"):
        toy.train(given, during=overflow(*range(2, 13)))


# ---- the folder ----


def test_a_folder_that_may_not_be_used_is_untouched(toy, tmp_path):
    toy.train("--stop-after 1")
    notes, mine = tmp_path / "notes", Path(shutil.copytree(toy.model, tmp_path / "mine"))
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    toy.refuses("--out .*holds a run; pass --resume, --overwrite")
    toy.refuses("--overwrite.* not allowed with .*--resume", "--resume --overwrite")
    for folder in (notes, mine):
        toy.refuses("holds no run", "--out", folder, "--resume")
        for how in ("", "--overwrite"):
            toy.refuses("files that are no run", "--out", folder, how)
    (mine / "args.json").write_text('{"output_dir": "output"}')  # of another tool
    toy.refuses("files that are no run", "--out", mine, "--overwrite")
    toy.refuses("holds no run of reward_train.py", "--resume", stage="reward_train")


def test_overwrite_deletes_what_a_run_writes(toy, whole):
    """Data, functions and models that lie in the run's folder stay; it is not its own --model."""
    toy.train("--seed 5")
    inside = write_rows(toy.out / "rows.jsonl", [{"text": "a"}])
    (toy.out / "g.py").write_text("def f(): pass")
    base = shutil.copytree(toy.model, toy.out / "base")
    mine = {path: path.read_bytes() for path in [Path(inside), toy.out / "g.py", *base.iterdir()]}
    for model in (toy.out, f"{toy.out}/../run"):
        toy.refuses("--overwrite: .* is also --model", "--overwrite", "--model", model)
    assert toy.train("--overwrite", "--data", inside, "--model", base) == 0
    assert toy.outcome() == whole
    assert {path: path.read_bytes() for path in mine} == mine


def test_overwrite_replaces_the_run(toy, whole):
    toy.train("--seed 5")
    for name in ("adapter/old", "checkpoint/step-0000009.pt", "rollouts.jsonl"):
        (toy.out / name).parent.mkdir(exist_ok=True)
        (toy.out / name).write_text("")
    assert toy.train("--overwrite") == 0
    assert toy.outcome() == whole and toy.steps() == [5, 6]
    assert not (toy.out / "adapter").exists() and not (toy.out / "rollouts.jsonl").exists()


def test_resume_leaves_files_of_ones_own(toy, whole):
    """Rows without a step, or with steps that are not this run's: notes, prompts, another log."""
    toy.train("--stop-after 2")
    mine = {"notes.txt": "x", "mine.jsonl": '{"prompt": "a"}\n', "log.jsonl": '{"step": 99}\n'}
    for name, text in mine.items():
        (toy.out / name).write_text(text)
    assert toy.train("--resume") == 0 and toy.outcome() == whole
    assert {name: (toy.out / name).read_text() for name in mine} == mine


def test_args_json(toy):
    toy.train()
    record = read_json(toy.out / "args.json")
    assert record["stage"] == "toy" and {"torch", "transformers"} < record["versions"].keys()
    assert (record["args"]["lr"], record["args"]["micro_tokens"]) == (1e-2, 512)
    assert record["command"] == sys.argv and record["args"]["data"] == [toy.data]


# ---- resume ----


def test_resume_refuses_another_run_by_name(toy):
    toy.train("--stop-after 1")
    for given, message in {
        "--lr 2e-4": "--lr was 0.01, is 0.0002",
        "--gold g.py:f": "--gold was None, is 'g.py:f'",
        "--seed 1 --lora-rank 4": "--seed was 0, is 1",
        "--dtype bf16": "--dtype was 'auto', is 'bf16'",
        "--epochs 3": "--epochs was None, is 3",
    }.items():
        toy.refuses(f"--resume: {message}", "--resume", given)
    with pytest.raises(UserError, match="--resume: .*other tokens"):
        toy.train("--resume", encoded=(1, 3))


def test_what_resume_may_change(toy, whole):
    """What was left out stays; more steps go on, fewer end at once."""
    toy.train("--stop-after 2")
    given = "--save-every 3 --eval-every 1 --stop-after 4 --steps 60 --micro-tokens 7 --device cpu"
    toy.train("--resume", given)
    assert toy.steps() == [2, 3, 4][-2:] and toy.numbers() == [0, 1, 2, 3, 3, 4, 4]
    del toy.argv[toy.argv.index("--steps") : toy.argv.index("--steps") + 2]
    del toy.argv[toy.argv.index("--lr") : toy.argv.index("--lr") + 2]
    args = toy.opened("--resume").args
    assert (args.steps, args.lr, args.micro_tokens) == (60, 1e-2, 512)
    assert toy.train("--resume --steps 3") == 0, "behind the plan: its end is written"
    assert toy.numbers()[-1] == 4 and (toy.out / "config.json").exists()


def test_a_run_that_ended_goes_on_with_more(toy, whole):
    """By its steps, by --target; with the same target it stays ended."""
    assert toy.train("--steps 4") == 0 and toy.train("--resume --steps 8") == 0
    assert toy.numbers()[-1] == 8
    assert toy.train("--overwrite --target 3") == 0 and toy.numbers()[-1] == 3
    assert read_json(toy.out / "args.json")["args"]["target"] == 3
    assert "target_reached" in (toy.out / "README.md").read_text()
    assert toy.train("--resume --target 3") == 0 and toy.numbers()[-1] == 3
    assert toy.train("--resume --target 5 --stop-after 4") == 0 and toy.numbers()[-1] == 4
    assert toy.train("--resume --target 5") == 0 and toy.numbers()[-1] == 5
    assert toy.train("--resume --target 50") == 0 and toy.numbers()[-1] == 6


def test_a_resumed_run_is_the_run_in_one_go(toy, whole, capsys):
    assert toy.train("--stop-after 2") == 0
    assert "stopped after step 2 of 6" in capsys.readouterr().out
    for shown in ("resumed    at step 2", "resumed    at step 6"):  # then only its end is repeated
        assert toy.train("--resume --stop-after 2") == 0, "already there: on to the end"
        assert shown in capsys.readouterr().out and toy.outcome() == whole
        assert toy.run.state["steps"] == [1, 2, 3, 4, 5, 6]
        assert toy.run.state["last"].tolist() == [6, 0.5]


@pytest.mark.parametrize("tail", [b'{"step": 2}', '{"step": 4, "answer": "é'.encode()[:-1], b""])
def test_a_log_is_cut_back_to_the_checkpoint(tail, toy, whole):
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
    (toy.out / "checkpoint" / "step-0000004.pt").unlink()
    assert toy.train("--resume") == 0 and toy.outcome() == whole


def test_two_checkpoints_are_kept(toy):
    seen, given = {}, "--steps 8 --save-every 3"
    watch = lambda run, step: seen.update({step: toy.steps()})  # noqa: E731
    assert toy.train(given, "--stop-after 5", during=watch) == 0
    assert toy.steps() == [3, 5] and toy.train(given, "--resume", during=watch) == 0
    assert toy.steps() == [6, 8] and [seen[step] for step in (1, 4, 7)] == [[], [3], [5, 6]]


class Bomb:
    """Unpickled, it makes a folder: what any pickle from a stranger may do."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


def test_a_damaged_checkpoint_is_named(toy, tmp_path, monkeypatch):
    """A silent start from an older step would cut the log. A pickle is never run."""
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    toy.train("--stop-after 4")
    file = toy.out / "checkpoint" / "step-0000004.pt"
    content = file.read_bytes()

    def saved(value):
        torch.save(value, buffer := io.BytesIO())
        return buffer.getvalue()

    for damaged in (content[: len(content) // 2], b"", saved({"step": 4, "state": Bomb()})):
        file.write_bytes(damaged)
        before = contents(toy.out)
        refused = error_of(toy.train, "--resume")
        assert re.search("--resume .*step-0000004.pt", refused)
        assert contents(toy.out) == before
    assert not (tmp_path / "exploded").exists()
    file.write_bytes(content)
    assert toy.train("--resume") == 0


WRONG = [None, True, -1, 0, 2.5, "x", [], [1], {}, {"a": [None]}]


@pytest.mark.parametrize("wrong", WRONG, ids=map(str, WRONG))
def test_another_type_in_args_json_is_one_line(wrong, toy, whole):
    """Or no matter, where the flags say it, or nobody reads it."""
    toy.train("--stop-after 2")
    before = contents(toy.out)
    record = read_json(toy.out / "args.json")
    places = [(record, key) for key in record] + [(record["args"], key) for key in record["args"]]
    for home, key in places:
        right, home[key] = home[key], wrong
        files.write_json(toy.out / "args.json", record)
        home[key] = right
        try:
            run = toy.opened("--resume")
            run.start({"policy": toy.policy()}, toy.tokenizer, (1, 2, 3), 4, [(1, 2)])
        except UserError as error:
            assert "\n" not in str(error) and "--" in str(error)
        except Exception as error:
            raise AssertionError(f"args.json {key}: {wrong!r}") from error
        for path, data in before.items():
            path.write_bytes(data) if data is not None else None


def test_a_broken_record_is_one_line(toy):
    toy.train("--stop-after 2")
    record = toy.out / "args.json"
    before = record.read_bytes()
    for data, message in (
        (b'{"stage": "to', "args.json"),
        (b"[1, 2]", "--resume"),
        (b"[" * 100_000, "args.json"),
    ):
        record.write_bytes(data)
        assert message in error_of(toy.train, "--resume")
    record.write_bytes(before)
    assert toy.train("--resume") == 0


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
    """A kill leaves what lay there before the change that it prevents: a run that is stopped, resumed
    and ended, and then each of the states that it went through, resumed."""
    toy.train("--steps 3")
    expected = toy.outcome()
    shutil.rmtree(toy.out)
    with monkeypatch.context() as patch:
        states = before_each_change(toy.out, patch)
        toy.train("--steps 3 --stop-after 2")
        toy.train("--steps 3 --resume")
    assert toy.outcome() == expected and len(states) > 30
    different = [state for i, state in enumerate(states) if state not in states[:i]]
    resumed = 0
    for state in [*different, contents(toy.out)]:
        shutil.rmtree(toy.out)
        for path, content in {toy.out: None, **state}.items():
            path.mkdir() if content is None else path.write_bytes(content)
        if (toy.out / "config.json").exists():  # then it is a model, of one of the checkpoints
            stored = [torch.load(f)[2][0] for f in (toy.out / "checkpoint").glob("step-*")]
            now = common.load_model(toy.out, "cpu", torch.float32).state_dict()
            assert any(torch.equal(now["transformer.wte.weight"], w["policy.model.transformer.wte.weight"]) for w in stored)  # fmt: skip
        if toy.steps():
            toy.train("--steps 3 --resume")
            resumed += 1
        else:
            if not (toy.out / "args.json").exists():  # refused as no run: there is nothing in it
                assert not [*toy.out.glob("*.jsonl")]
                shutil.rmtree(toy.out)
            toy.train("--steps 3 --overwrite")
        for path in toy.out.rglob(".writing-*"):  # of the kill
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert toy.outcome() == expected
    assert resumed > 20


@pytest.mark.parametrize("number", SIGNALS)
def test_signals(number, toy, whole, capfd):
    """The first one finishes the step and keeps it; a second one ends at once."""
    before, presses = [signal.getsignal(n) for n in SIGNALS], [number]

    def press(run, step):
        assert signal.getsignal(signal.SIGINT) is not before[0]
        for pressed in presses if step == 3 else ():
            os.kill(os.getpid(), pressed)

    assert toy.train("--save-every 100", during=press) == 128 + number
    out, err = capfd.readouterr()
    assert "stopping after this step; --resume continues" in err
    assert "stopped after step 3 of 6" in out and str(toy.out) in out
    assert toy.steps() == [3] and toy.numbers()[-1] == 3
    common.load_model(str(toy.out), "cpu", torch.float32)
    assert [signal.getsignal(n) for n in SIGNALS] == before
    assert toy.train("--resume") == 0 and toy.outcome() == whole
    presses += SIGNALS
    with pytest.raises(KeyboardInterrupt):
        toy.train("--overwrite", during=press)


def test_full_disk(toy, whole, capsys):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = len(whole[0])
    for share, how in ((0.5, ""), (1.5, "--overwrite")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * share), limit[1]))
        with pytest.raises(SystemExit) as stop:
            files.command(lambda how=how: toy.train(*[how] * (toy.out / "args.json").exists()))
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        shown = capsys.readouterr().err
        assert stop.value.code == 2 and "error: " in shown and "Traceback" not in shown
    assert toy.train("--overwrite") == 0 and toy.outcome() == whole


# ---- what is shown ----


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
    assert second["tokens_per_s"] > 0 and second["time_s"] >= 0
    assert toy.rows("samples") == [{"step": s, "prompt": "p", "answer": f"é {s}"} for s in (0, 6)]
    out = capsys.readouterr().out
    assert re.search("eval/loss  *before 2.000  after 0.167", out)
    assert out.rstrip().endswith("next: python evaluate.py")


def test_the_model_card(toy):
    """README.md says what the run knows."""
    from huggingface_hub import ModelCard

    toy.train()
    card = ModelCard.load(toy.out / "README.md")  # the hub's own reader of the header
    assert card.data.base_model == toy.model and "toy" in card.data.tags
    assert "after step 6 of `toy.py`" in card.text and "before 2.000  after 0.167" in card.text


def test_errors_of_the_user_end_in_one_line_and_status_2(capsys):
    ends = [
        (UserError("--pairs x: no such file"), 2, "error: --pairs x: no such file\n"),
        (common.Refused("the chat template refuses"), 2, "error: the chat template refuses\n"),
        (OSError(28, "No space left on device"), 2, "No space left"),
        (ModuleNotFoundError("No module named 'wandb'"), 2, "'wandb'"),
        (torch.OutOfMemoryError("2 GiB"), 2, "2 GiB; lower --micro-tokens"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError(), None, ""),
    ]
    for error, code, text in ends:
        with pytest.raises(SystemExit if code else type(error)) as caught:
            files.command(Mock(side_effect=error), "; lower --micro-tokens")
        assert getattr(caught.value, "code", None) == code and text in capsys.readouterr().err


# ---- dpo.py: killed and resumed, bit for bit ----


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The first 12 bundled pairs: of the base's own kind of text."""
    rows = [row for _, row in zip(range(12), files.read_jsonl(REPO / "data/prefs.jsonl"))]
    return write_rows(tmp_path_factory.mktemp("few") / "pairs.jsonl", rows)


def dpo_command(few, out, *given):
    argv = (
        f"--model {REPO / common.BASE} --steps 4 --batch-size 4 --eval-fraction 0.3 --eval-every 2"
    )
    argv += " --save-every 2 --max-new-tokens 4 --warmup 0.3 --device cpu"
    return words(argv, "--pairs", few, "--prompts", few, "--out", out, *given)


@pytest.mark.parametrize("given", ["", "--lora-rank 4"])
def test_dpo_killed_and_resumed_is_one_run(given, few, tmp_path, monkeypatch, capsys):
    """Forgotten moments, a restarted schedule, a batch drawn twice, a reference of the resumed policy,
    rows that stand twice: all show here."""
    whole, out = tmp_path / "whole", tmp_path / "cut off"
    assert dpo.main(dpo_command(few, whole, given)) == 0
    real = runs.Run.log

    def log(self, row):
        if self.step == 3 and "lr" in row:
            raise KeyboardInterrupt
        real(self, row)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runs.Run, "log", log)
        dpo.main(dpo_command(few, out, given))
    assert not (out / "model.safetensors").exists()
    capsys.readouterr()
    assert dpo.main(dpo_command(few, out, given, "--resume")) == 0
    shown = capsys.readouterr().out
    assert "resumed    at step 2" in shown and "preflight" not in shown
    assert outcome(out) == outcome(whole)
    if given:
        name = "adapter/adapter_model.safetensors"
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    steps = [row["step"] for row in outcome(whole)[1]]
    assert steps == [0, 1, 2, 2, 3, 4, 4]
    evaluations = [row for row in outcome(whole)[1] if "eval/loss" in row]
    assert evaluations[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert evaluations[0]["val/kl"] == pytest.approx(0, abs=1e-4)
    assert evaluations[-1]["eval/loss"] != evaluations[0]["eval/loss"]


@pytest.mark.parametrize("given", ["--micro-tokens 300", "--grad-checkpoint", "--device cpu"])
def test_dpo_goes_on_with_another_cut(given, few, tmp_path):
    """Which changes the order of sums, and nothing else."""
    assert dpo.main(dpo_command(few, tmp_path / "whole")) == 0
    assert dpo.main(dpo_command(few, tmp_path / "run", "--stop-after 2")) == 0
    assert dpo.main(dpo_command(few, tmp_path / "run", "--resume", given)) == 0
    for got, want in zip(outcome(tmp_path / "run")[1], outcome(tmp_path / "whole")[1], strict=True):
        assert got == pytest.approx(want, rel=1e-3, abs=1e-4)
