"""parts/runs.py: step, log, checkpoint, resume, stop; with a toy trainer. (The trainers: test_resume.)"""

import contextlib
import io
import itertools
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import common
from parts import files, rollouts, runs
from parts.files import UserError
from tiny import (
    cases,
    error_of,
    log_of,
    outcome,
    policy_of,
    read_json,
    tiny_model,
    words,
    write_rows,
)

if sys.platform != "linux":
    pytest.skip("forks and signals as on Linux", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("quiet_process")
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
        return runs.Run(stage, args, ("eval/loss", "val/gold"))

    def policy(self):
        return policy_of(self.model, trainable=True)

    def train(self, *given, during=None, encoded=(1, 2)):
        run, policy = self.opened(*given), self.policy()
        self.run = run
        optimizer = run.start({"policy": policy}, self.tokenizer, (1, 2, 3), 4, [encoded])
        run.state.setdefault("steps", [])
        run.state.setdefault("last", torch.zeros(2))
        if run.step == 0:
            run.evaluation({"eval/loss": 2.0, "val/gold": None}, [{"prompt": "p", "answer": "é 0"}])
        else:  # as rollouts.WatchedRun does
            run.state["ended"] = self.reason(run)
        for step in run.steps():
            optimizer.zero_grad()
            loss = sum((w - step).square().mean() for w in policy.parameters())
            (run.loss_scale * loss).backward()
            found = during(run, step) if during else None  # a loss in place of the toy's
            run.state["steps"].append(step)
            run.state["last"] = torch.tensor([step, 0.5])
            total, norm = run.clip(found or loss.item(), [f"file:{step}"])
            lr = run.set_lr(step)
            optimizer.step()
            run.log({"loss": total, "lr": lr, "grad_norm": norm, "tokens": 50})
            if run.evaluates(step):
                run.evaluation({"eval/loss": 1 / step}, [{"prompt": "p", "answer": f"é {step}"}])
            run.state["ended"] = self.reason(run)
        return run.finish("evaluate.py")

    def reason(self, run):
        return "target_reached" if run.step >= (run.args.target or math.inf) else None

    def numbers(self):
        return [row["step"] for row in log_of(self.out)]

    def steps(self):
        return sorted(int(p.stem[-7:]) for p in (self.out / "checkpoint").glob("step-*"))

    def refuses(self, message, *given, **how):
        before = contents(self.out.parent)
        assert re.search(message, error_of(lambda: self.opened(*given, **how)))
        assert contents(self.out.parent) == before


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
    return outcome(toy.out)


# ---- rates, optimiser ----


@cases("""
schedule | factors
constant | [1, 1, 1, 1, 1, 1, 1, 1]
linear | [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
cosine | [1.0, 0.9619397663, 0.8535533906, 0.6913417162, 0.5, 0.3086582838, 0.1464466094, 0.0380602337]
""")
def test_the_rate(schedule, factors):
    """Two of ten steps rise, eight fall."""
    found = [runs.lr_factor(step, 10, 0.2, schedule) for step in range(1, 11)]
    assert found == pytest.approx([0.5, 1, *factors])
    assert runs.lr_factor(1, 1, 0.0, schedule) == 1, "one step without warm-up is a whole one"


@cases("""
given | per_epoch | planned | lr
--lr 0.5 | 4 | 24 | 0.5
--lora-rank 2 | 3 | 24 | 3
--epochs 2 | 3 | 6 | 1
--steps 5 | 25 | 5 | 1
--device cpu | 25 | 25 | 1
""")
def test_plan_and_default_rate(given, per_epoch, planned, lr, toy, folders):
    """Without flags: whole passes that make 24 steps; the rate by size and LoRA."""
    toy.argv = ["--out", toy.out, "--model", folders["llama"]]
    run = toy.opened(given)
    run.start({"policy": toy.policy()}, toy.tokenizer, (1, 2, 3), per_epoch, [[1]])
    assert (run.planned, run.args.lr) == (planned, lr)


def test_each_module_is_clipped_and_a_head_has_its_own_rate(toy):
    """Clipping the first alone would leave PPO's critic with gradients of any size. AdamW is the fused
    one, without decay. (Whose rate is whose: test_ppo.py.)"""
    run, critic = toy.opened("--schedule linear --warmup 0.34"), torch.nn.Linear(4, 1)
    modules = {"policy": toy.policy(), "critic": critic}
    optimizer = run.start(modules, toy.tokenizer, (1, 2, 3), 4, [[1]], own_lr={critic: 1e-1})
    (100 * sum(w.sum() for w in run.modules.parameters())).backward()

    def norm(module):
        grads = [w.grad for w in module.parameters() if w.grad is not None]
        return torch.nn.utils.get_total_norm(grads).item()

    before = norm(modules["policy"])
    assert run.clip(0.0, []) == (0.0, pytest.approx(before)) and before > 1
    assert [*map(norm, modules.values())] == pytest.approx([1, 1], abs=1e-4)
    # step 5 of 6, of which the first 3 rise: two thirds are left
    assert run.set_lr(5) == pytest.approx(2e-2 / 3)
    keys = "base_lr", "lr", "weight_decay", "fused"
    groups = sorted({tuple(group[key] for key in keys) for group in optimizer.param_groups})
    assert groups == [(x, pytest.approx(2 * x / 3), 0, True) for x in (1e-2, 1e-1)]


@cases(r"""
kind | message | logged
loss | loss nan.* not finite; rows .*file:3.*--lr | [0, 1, 2]
gradient | gradient norm [infa]+: not finite; rows .*file:1 | [0]
""")
def test_what_is_not_finite_stops_the_run(kind, message, logged, toy):
    """NaN in one batch is NaN in all weights: stopped in front of the update, the rows named."""

    def during(run, step):
        if kind == "loss":
            return math.nan if step == 3 else None
        next(run.policy.parameters()).grad[0, 0] = math.inf

    with pytest.raises(UserError, match=message):
        toy.train(during=during)
    assert toy.numbers() == logged and toy.steps() == logged[1:]
    assert not (toy.out / "config.json").exists(), "no model before its end"


def test_an_fp16_overflow_skips_the_step(toy):
    """Steps 2 and 3 overflow and halve the scale; of 1024 the 11th in a row is no overflow."""
    scales, weights = [], []

    def spoiled(*at):
        def during(run, step):
            weight = next(run.policy.parameters())
            weight.grad[0, 0] += math.inf if step in at else 0
            weights.append(weight.detach().clone())
            scales.append(run.loss_scale)

        return during

    given = "--dtype fp16"
    assert toy.train(given, "--stop-after 4", during=spoiled(2, 3)) == 0
    assert toy.train(given, "--resume", during=spoiled(5)) == 0
    assert scales == [2.0**n for n in (10, 10, 9, 8, 8, 7)], "the scale is resumed, too"
    assert [torch.equal(*pair) for pair in itertools.pairwise(weights)] == [0, 1, 1, 0, 1]
    log = log_of(toy.out)
    assert max(row.get("loss", 0) for row in log) < 1000, "what is logged is not scaled"
    assert 0 < max(row.get("grad_norm") or 0 for row in log) < 10, "nor what AdamW reads"
    with pytest.raises(UserError, match="gradient norm (inf|nan): not finite; rows .*file:12"):
        toy.train(given, "--overwrite --steps 20 --save-every 50", during=spoiled(*range(2, 13)))


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
    base = shutil.copytree(toy.model, toy.out / "base")
    mine = {path: path.read_bytes() for path in [Path(inside), *base.iterdir()]}
    for name in ("adapter/old", "checkpoint/step-0000009.pt", "rollouts.jsonl"):
        (toy.out / name).parent.mkdir(exist_ok=True)
        (toy.out / name).write_text("")
    for model in (toy.out, f"{toy.out}/../run"):
        toy.refuses("--overwrite: .* is also --model", "--overwrite", "--model", model)
    assert toy.train("--overwrite", "--data", inside, "--model", base) == 0
    assert outcome(toy.out) == whole and toy.steps() == [5, 6]
    assert {path: path.read_bytes() for path in mine} == mine
    assert not (toy.out / "adapter").exists() and not (toy.out / "rollouts.jsonl").exists()


def test_what_a_run_says_of_itself(toy):
    """args.json, and README.md, as the hub's own reader of its header reads it."""
    from huggingface_hub import ModelCard

    toy.train()
    record, card = read_json(toy.out / "args.json"), ModelCard.load(toy.out / "README.md")
    assert record["stage"] == "toy" and {"torch", "transformers"} < record["versions"].keys()
    assert (record["args"]["lr"], record["args"]["micro_tokens"]) == (1e-2, 512)
    assert record["command"] == sys.argv and record["args"]["data"] == [toy.data]
    assert card.data.base_model == toy.model and "toy" in card.data.tags


# ---- resume ----


@cases("""
given | fact
--lr 2e-4 | --lr was 0.01, is 0.0002
--gold g.py:f | --gold was None, is 'g.py:f'
--seed 1 --lora-rank 4 | --seed was 0, is 1
--dtype bf16 | --dtype was 'auto', is 'bf16'
--epochs 3 | --epochs was None, is 3
""")
def test_resume_refuses_another_run_by_name(given, fact, toy):
    toy.train("--stop-after 1")
    toy.refuses(f"--resume: {fact}", "--resume", given)
    with pytest.raises(UserError, match="--resume: .*other tokens"):
        toy.train("--resume", encoded=(1, 3))


def test_what_resume_may_change(toy):
    """What was left out stays; more steps go on, fewer end at once. Two checkpoints are kept."""
    seen = []
    toy.train("--stop-after 2")
    given = "--save-every 3 --eval-every 1 --stop-after 5 --steps 60 --micro-tokens 7 --device cpu"
    toy.train("--resume", given, during=lambda run, step: seen.append(toy.steps()))
    assert seen == [[1, 2], [2, 3], [2, 3]] and toy.steps() == [3, 5]
    assert toy.numbers() == [0, 1, 2, 3, 3, 4, 4, 5, 5]
    del toy.argv[toy.argv.index("--lr") :]
    args = toy.opened("--resume").args
    assert (args.steps, args.lr, args.micro_tokens) == (60, 1e-2, 512)
    assert toy.train("--resume --steps 3") == 0, "behind the plan: its end is written"
    assert toy.numbers()[-1] == 5 and (toy.out / "config.json").exists()


@cases("""
first | more | last
--steps 4 | --steps 8 | 8
--target 3 | --target 3 | 3
--target 3 | --target 5 --stop-after 4 | 4
--target 3 | --target 5 | 5
--target 3 | --target 50 | 6
""")
def test_a_run_that_ended_goes_on_with_more(first, more, last, toy):
    """By its steps, by --target; with the same target it stays ended."""
    assert toy.train(first) == 0 and toy.numbers()[-1] == int(first[-1])
    assert ("target_reached" in (toy.out / "README.md").read_text()) == ("target" in first)
    assert toy.train("--resume", more) == 0 and toy.numbers()[-1] == last


@pytest.mark.parametrize("tail", [b'{"step": 2}', '{"step": 4, "answer": "é'.encode()[:-1], b""])
def test_a_log_is_cut_back_to_the_checkpoint(tail, toy, whole):
    """Rows behind the checkpoint would stand twice; a torn line, cut within é, breaks readers. Files
    of one's own stay: notes, prompts, another log."""

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
    mine = {"notes.txt": "x", "mine.jsonl": '{"prompt": "a"}\n', "log.jsonl": '{"step": 99}\n'}
    for name, text in mine.items():
        (toy.out / name).write_text(text)
    for _ in "whole", "its end again":  # --stop-after is behind both
        assert toy.train("--resume --stop-after 2") == 0 and outcome(toy.out) == whole
        assert toy.run.state["steps"] == [1, 2, 3, 4, 5, 6]
        assert toy.run.state["last"].tolist() == [6, 0.5]
    assert {name: (toy.out / name).read_text() for name in mine} == mine


class Bomb:
    """Unpickled, it makes a folder: what any pickle from a stranger may do."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


def test_a_damaged_checkpoint_is_named(toy, tmp_path, monkeypatch):
    """A silent start from an older step would cut the log. A pickle is never run."""
    toy.train("--stop-after 2")
    file, bomb = toy.out / "checkpoint" / "step-0000002.pt", io.BytesIO()
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    torch.save(Bomb(), bomb)
    for damaged in (file.read_bytes()[:5000], b"", bomb.getvalue()):
        file.write_bytes(damaged)
        before = contents(tmp_path)
        assert re.search("--resume .*step-0000002.pt", error_of(toy.train, "--resume"))
        assert contents(tmp_path) == before, "nothing exploded"


@pytest.mark.parametrize("wrong", [None, -1, "x", [], {"a": [None]}], ids=str)
def test_another_type_in_args_json_is_one_line(wrong, toy):
    """Or no matter, where the flags say it, or nobody reads it."""
    toy.train("--stop-after 1")
    record = read_json(toy.out / "args.json")
    arguments = [dict(record, args=record["args"] | {key: wrong}) for key in record["args"]]
    for content in [wrong, *(record | {key: wrong} for key in record), *arguments]:
        files.write_json(toy.out / "args.json", content)
        with contextlib.suppress(UserError):
            run = toy.opened("--resume")
            run.start({"policy": toy.policy()}, toy.tokenizer, (1, 2, 3), 4, [(1, 2)])


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

    for name in "rename replace mkdir rmdir unlink chmod".split():
        patch.setattr(os, name, counted(getattr(os, name)))
    patch.setattr(os, "fsync", counted(lambda descriptor: None))  # no power fails here
    patch.setattr(torch, "save", in_halves)
    return states


@pytest.mark.slow
def test_killed_at_each_change_of_the_disk(toy, monkeypatch):
    """A kill leaves what lay there before the change that it prevents: a run that is stopped, resumed
    and ended, and then each of the states that it went through, resumed."""
    toy.train("--steps 3")
    expected = outcome(toy.out)
    shutil.rmtree(toy.out)
    with monkeypatch.context() as patch:
        states = before_each_change(toy.out, patch)
        toy.train("--steps 3 --stop-after 2")
        toy.train("--steps 3 --resume")
    assert outcome(toy.out) == expected and len(states) > 30
    different, resumed = [state for i, state in enumerate(states) if state not in states[:i]], 0
    for state in [*different, contents(toy.out)]:
        shutil.rmtree(toy.out)
        for path, content in {toy.out: None, **state}.items():
            path.mkdir() if content is None else path.write_bytes(content)
        if (toy.out / "config.json").exists():  # then it is a model, of one of the checkpoints
            now = common.load_model(toy.out, "cpu", torch.float32).transformer.wte.weight
            stored = [torch.load(f)[2][0] for f in (toy.out / "checkpoint").glob("step-*")]
            assert any(torch.equal(now, w["policy.model.transformer.wte.weight"]) for w in stored)
        resumed += bool(toy.steps())
        if not (toy.out / "args.json").exists():  # refused as no run: there is nothing in it
            assert not [*toy.out.glob("*.jsonl")]
            shutil.rmtree(toy.out)
        toy.train("--steps 3", "--resume" if toy.steps() else "--overwrite")
        for path in toy.out.rglob(".writing-*"):  # of the kill
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert outcome(toy.out) == expected
    assert resumed > 20


@pytest.mark.parametrize("number", SIGNALS)
def test_signals(number, toy, whole, capfd):
    """The first one finishes the step and keeps it; a second one ends at once."""
    before, presses = [signal.getsignal(n) for n in SIGNALS], [number]

    def press(run, step):
        for pressed in presses if step == 3 else ():
            os.kill(os.getpid(), pressed)

    assert toy.train("--save-every 100", during=press) == 128 + number
    out, err = capfd.readouterr()
    assert "--resume" in err and "stopped after step 3 of 6" in out
    assert toy.steps() == [3] and toy.numbers()[-1] == 3
    common.load_model(str(toy.out), "cpu", torch.float32)
    assert [signal.getsignal(n) for n in SIGNALS] == before
    assert toy.train("--resume") == 0 and outcome(toy.out) == whole
    presses += SIGNALS
    with pytest.raises(KeyboardInterrupt):
        toy.train("--overwrite", during=press)


def test_a_signal_while_the_ranks_confer(toy, monkeypatch):
    """They have said already whether one was caught; the next step's end finds it."""

    def confer(caught):
        if toy.run.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return caught

    monkeypatch.setattr(runs, "gather", confer)
    assert toy.train() == 143 and toy.numbers()[-1] == 4


# ---- what is shown ----


def test_rows_are_written_at_once(toy, monkeypatch):
    def during(run, step):
        run.write("rollouts.jsonl", [{"step": step, "x": math.inf}])
        written.append((len(toy.numbers()), log_of(toy.out, "rollouts")[-1]))

    written, wandb = [], Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for end in ("--stop-after 2", "--resume"):
        assert toy.train("--wandb-project mine", end, during=during) == 0
    calls = wandb.init.return_value.method_calls  # .log(row, step=…)
    assert [call.kwargs["step"] for call in calls] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert written == [(step, {"step": step, "x": None}) for step in range(1, 7)]
    assert log_of(toy.out)[0] == {"step": 0, "eval/loss": 2.0, "val/gold": None}
    samples = [{"step": s, "prompt": "p", "answer": f"é {s}"} for s in (0, 6)]
    assert log_of(toy.out, "samples") == samples


@pytest.mark.parametrize("error, code, text", [
    (UserError("--pairs x: no such file"), 2, "error: --pairs x: no such file\n"),
    (common.Refused("the chat template refuses"), 2, "error: the chat template refuses\n"),
    (OSError(28, "No space left on device"), 2, "No space left"),
    (ModuleNotFoundError("No module named 'wandb'"), 2, "'wandb'"),
    (torch.OutOfMemoryError("2 GiB"), 2, "2 GiB; lower --micro-tokens"),
    (KeyboardInterrupt(), 130, ""), (ZeroDivisionError(), None, ""),
], ids=repr)  # fmt: skip
def test_errors_of_the_user_end_in_one_line_and_status_2(error, code, text, capsys):
    with pytest.raises(SystemExit if code else type(error)) as caught:
        files.command(Mock(side_effect=error), "; lower --micro-tokens")
    assert getattr(caught.value, "code", None) == code and text in capsys.readouterr().err


def test_a_critic_whose_gradient_overflows_in_fp16_takes_no_step(toy):
    """Only the policy's norm was looked at: AdamW then wrote inf · 0 into the critic."""
    run = toy.opened("--dtype fp16")
    policy, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    run.modules = torch.nn.ModuleDict({"policy": policy, "critic": critic})
    run.optimizer = torch.optim.AdamW(run.modules.parameters())
    before = critic.weight.clone()
    (critic(policy(torch.ones(1, 2))).sum() * run.loss_scale).backward()
    critic.weight.grad.fill_(math.inf)
    run.clip(0.0, [])
    run.optimizer.step()
    assert run.loss_scale == runs.LOSS_SCALE / 2 and torch.equal(critic.weight, before)


def test_best_weights_are_put_back_twice(monkeypatch):
    """torch puts shards into what it loads: grpo_rubric.py --fsdp, which restores before its test
    rows and again at the end, ended there without a model."""
    run = object.__new__(rollouts.WatchedRun)
    run.state, run.policy = {"best": {"weights": {"w": 1}, "step": 3}}, None
    monkeypatch.setattr(run, "unfinished", lambda: False, raising=False)
    sharded = Mock(side_effect=lambda model, weights, options: weights.clear())
    monkeypatch.setattr(rollouts, "set_model_state_dict", sharded)
    assert [run.restore_best(), run.restore_best()] == [3, 3]
    assert run.state["best"]["weights"] == {"w": 1}
