"""A run that was stopped, killed or cut off ends in the same bits as one that never was.

Every run here is a process of its own, so that a SIGKILL is one. To keep the file fast they are forked from one process
that has imported torch and the stages (`Launcher`); the command line's own start is tested once, by its real name.

A killer that waits for the clock would hit the imports on a slow machine and miss the run on a fast one. So a child counts
what it does to its run folder (every open, mkdir, rename, remove, flush and every line of the log, of which it writes half)
and kills itself at a chosen or a random one of them: a moment of the run, the same on every machine. A second killer, from
outside and by the clock, waits until a step is logged and strikes a random few milliseconds later.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from test_agent import echo, line
from tiny import pair_rows, tiny_model, tiny_reward_model, write_pairs, write_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; forks")
REPO = Path(__file__).resolve().parent.parent
STAGES = ["sft", "reward_train", "dpo", "ppo", "grpo_rubric"]
RESUMED = [*STAGES, "grpo_agent"]
PPO = ["--rollouts", 7, "--kl-target", 2, "--patience", 0, "--on-hack", "warn"]
GRPO = ["--group-size", 2, "--num-substeps", 2, "--beta", 0.05]
GRPO += ["--patience", 0, "--on-hack", "warn"]
CHECKS = [{"check": "regex:match", "pattern": "[aeiou]"}, {"check": "text:max_chars", "max_chars": 4}]  # fmt: skip
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}  # the columns that may differ

LAUNCHER = r'''
import io, json, os, signal, sys, time
sys.path[:0] = json.loads(sys.argv[1])
import torch, transformers, common, sft, reward_train, dpo, ppo, grpo_rubric, grpo_agent
from parts import files
import transformers.models.llama.modeling_llama  # what each child would import anew
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
torch.set_num_threads(1)
ppo.ROLLOUTS_EVERY = 2  # so that six steps show it


def kill_in(module, name, forward):
    """SIGKILL at the forward-th call of token_logps inside module.name, such as the reference pass."""
    inside, real, count = getattr(module, name), module.token_logps, 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == forward:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    def pass_(*args, **kwargs):
        module.token_logps = counted
        found = inside(*args, **kwargs)
        module.token_logps = real
        return found

    setattr(module, name, pass_)


def count_and_kill(folder, kill_at, trace):
    """SIGKILL at the kill_at-th thing that is done to the folder; the trace file gets a line for each."""
    done, log = 0, os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write

    def happened(what, half=None):
        nonlocal done
        done += 1
        write(log, (what.replace(folder, "") + "\n").encode())
        if done == kill_at:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, arguments):
        paths = [os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes, os.PathLike))]
        if any(p.startswith(folder) for p in paths):
            happened(f"{event} {' '.join(paths)}")

    class Log(io.FileIO):  # a log opened to append
        def write(self, data):
            torn = lambda: super(Log, self).write(data[: len(data) // 2])
            happened(f"write {self.name}", torn)
            return super().write(data)

    def opened(path, mode="r", *args, **kwargs):
        append = mode == "ab" and str(path).startswith(folder)
        return Log(str(path), "a") if append else open(path, mode, *args, **kwargs)

    def flushed(descriptor, real=os.fsync):
        real(descriptor)
        happened("fsync " + os.readlink(f"/proc/self/fd/{descriptor}"))

    def saved(state, file, real=torch.save):
        real(state, file)
        file.flush()
        happened("half of state.pt", lambda: os.truncate(file.fileno(), file.tell() // 2))

    sys.addaudithook(hook)
    files.open, os.fsync, torch.save = opened, flushed, saved


def child(job):
    out = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    if job["kill_in_reference"]:
        kill_in(dpo, "reference_logps", job["kill_in_reference"])
    if job["pause"]:  # a step takes at least this long
        module = sys.modules[job["stage"]]
        home, name = (module, "prompts_of_step" if module is ppo else "batch_indices")
        home = home if hasattr(home, name) else common
        real = getattr(home, name)
        setattr(home, name, lambda *a, **k: time.sleep(job["pause"]) or real(*a, **k))
    if job["largest_file"]:  # a disk that is full: writes beyond this fail
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    if job["kill_at"] is not None:
        count_and_kill(job["folder"], job["kill_at"], job["trace"])
    files.command(lambda: sys.modules[job["stage"]].main(job["argv"]))


print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(json.loads(line))
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''


class Launcher:
    """Starts a stage in a forked process: `run` waits for its exit code, `start` and `wait` leave time for a signal."""

    def __init__(self, folder):
        self.log, self.trace = folder / "log.txt", folder / "trace.txt"
        paths = json.dumps([str(REPO), str(REPO / "tests")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", LAUNCHER, paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        assert self.process.stdout.readline() == "ready\n"

    def start(self, stage, argv, out, kill_at=None, pause=0, largest_file=0, kill_in_reference=0):
        job = {"stage": stage, "argv": [str(a) for a in argv], "folder": str(out)}
        job |= {"kill_at": kill_at, "pause": pause, "largest_file": largest_file}
        job |= {"kill_in_reference": kill_in_reference}
        job |= {"log": str(self.log), "trace": str(self.trace)}
        self.trace.unlink(missing_ok=True)
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self):
        return int(self.process.stdout.readline())

    def run(self, *args, **kwargs):
        self.start(*args, **kwargs)
        return self.wait()

    def said(self):
        return self.log.read_text()

    def traced(self):
        """Without the random part of temporary names, which differs from run to run."""
        text = re.sub(r"(\.(?:saving-|\w+\.(?:jsonl?|pt)\.))\w+", r"\1", self.trace.read_text())
        return text.splitlines()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """The process that all runs of this file are forked from."""
    launcher = Launcher(tmp_path_factory.mktemp("launcher"))
    yield launcher
    launcher.process.stdin.close()
    launcher.process.wait(timeout=30)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny model, a reward model, and 18 pairs: batches of 4, so that six steps cross an epoch and meet its short last
    batch."""
    folder = tmp_path_factory.mktemp("world")
    return {
        "model": tiny_model("llama", folder, max_position_embeddings=512),
        "reward": tiny_reward_model("llama", folder / "reward"),
        "data": write_pairs(folder / "pairs.jsonl", 18),
        "env": echo(folder),
        # seven of nine train, two a step
        "rubrics": write_rows(folder / "rubrics.jsonl", [{"prompt": r["prompt"], "rubrics": CHECKS} for r in pair_rows(9)]),
    }  # fmt: skip


def command(stage, world, out, *flags):
    if stage == "grpo_agent":
        argv = line(world["model"], world["env"], out, "--steps", 6, "--lr", 1e-3)
        return [*argv, *flags]
    data = {"sft": "--data", "ppo": "--prompts", "grpo_rubric": "--data"}.get(stage, "--pairs")
    file = world["rubrics" if stage == "grpo_rubric" else "data"]
    argv = [data, file, "--model", world["model"]]
    argv += ["--out", out, "--batch-size", 4, "--steps", 6, "--eval-every", 2, "--save-every", 1]
    argv += ["--lr", 1e-3] + (["--eval-fraction", 0.2] if stage != "grpo_rubric" else GRPO)
    argv += [] if stage == "reward_train" else ["--max-new-tokens", 3]
    # a critic of its own, a coefficient that moves, a last batch of 3; watch.py never stops these runs
    argv += PPO + ["--reward-model", world["reward"]] if stage == "ppo" else []
    return [*argv, *flags]


def outcome(out):
    """Weights, reward statistics, log and samples of a finished run, without the columns of the clock."""
    config = json.loads((out / "config.json").read_text())
    return {
        "weights": (out / "model.safetensors").read_bytes(),
        "config": {k: v for k, v in config.items() if k.startswith("reward_")},
        "metrics": [{k: v for k, v in r.items() if k not in CLOCK} for r in rows(out)],
        **{log: (out / f"{log}.jsonl").read_text() if (out / f"{log}.jsonl").exists() else "" for log in ("samples", "rollouts")},
    }  # fmt: skip


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_same(out, expected):
    got = outcome(out)
    assert got["metrics"] == expected["metrics"]
    assert got["config"] == expected["config"]
    assert got["samples"] == expected["samples"]
    assert got["rollouts"] == expected["rollouts"]
    assert got["weights"] == expected["weights"], "the same log, but other weights"


@pytest.fixture(scope="module")
def unstopped(launcher, world, tmp_path_factory):
    """Each stage's outcome of six steps in one go, and what it does to its folder."""
    results = {}
    for stage in RESUMED:
        out = tmp_path_factory.mktemp("unstopped") / "run"
        assert launcher.run(stage, command(stage, world, out), out, kill_at=0) == 0, launcher.said()
        results[stage] = outcome(out), launcher.traced()
        steps = [r["step"] for r in rows(out)]
        assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]  # an evaluation is a row of its own
    return results


def stopped_after(step):
    """What a run says that was asked to stop."""
    return f"stopped after step {step} of 6; its weights are in"


def go_on(launcher, stage, argv, out, **how):
    """What a user does after a crash: --resume; where that says that there is no run yet, the plain command."""
    code = launcher.run(stage, [*argv, "--resume"], out, **how)
    if code == 2 and "holds no run" in launcher.said():
        code = launcher.run(stage, [*argv, "--overwrite"], out, **how)
    return code


# ---- stopped on purpose ----


@pytest.mark.parametrize("stage", RESUMED)
@pytest.mark.parametrize("after", [1, 3])
def test_stop_after_and_resume(stage, after, launcher, world, unstopped, tmp_path):
    """Three steps, then --resume, are six steps in one go: weights, log and samples to the last bit. Forgotten optimiser
    moments, a restarted schedule, a batch drawn twice or a reference built from the resumed policy all show here."""
    out = tmp_path / "run"
    argv = command(stage, world, out)
    assert launcher.run(stage, [*argv, "--stop-after", after], out) == 0, launcher.said()
    assert stopped_after(after) in launcher.said()
    assert rows(out)[-1]["step"] == after
    assert launcher.run(stage, [*argv, "--resume"], out) == 0, launcher.said()
    assert f"resumed at step {after}" in launcher.said() and "preflight" not in launcher.said()
    assert_same(out, unstopped[stage][0])


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_resume(stage, launcher, world, tmp_path):
    """With --lora-rank a checkpoint holds the adapters alone: three steps, a kill at a random moment, then --resume, are six
    steps in one go. Until the end only adapter/ is written, not the merged weights."""
    flags = ("--lora-rank", 4, "--lr", 1e-2)
    argv = command(stage, world, tmp_path / "whole", *flags)
    assert launcher.run(stage, argv, tmp_path / "whole") == 0, launcher.said()
    out, kill = tmp_path / "cut", random.Random(stage).randint(5, 40)
    argv = command(stage, world, out, *flags)
    assert launcher.run(stage, [*argv, "--stop-after", 3], out) == 0, launcher.said()
    assert (out / "adapter").is_dir() and not (out / "model.safetensors").exists()
    assert launcher.run(stage, [*argv, "--resume"], out, kill_at=kill) == -signal.SIGKILL
    assert launcher.run(stage, [*argv, "--resume"], out) == 0, launcher.said()
    assert_same(out, outcome(tmp_path / "whole"))


@pytest.mark.parametrize("critic", ["rm", "policy", "shared"])
def test_ppo_resumes_all_it_trains(critic, launcher, world, tmp_path):
    """Policy, critic, the optimiser's moments of both, the KL coefficient, the place in the prompts and the best weights so far (trl#2657):
    three steps, then killed at a random moment behind them, then --resume, are six in one go with each kind of critic. The
    coefficient has moved by then, and the best validation lies before the stop, so that forgetting either shows."""
    flags = ("--critic", critic, "--lr", 3e-2, "--seed", 2)  # the best validation is at step 2
    argv = command("ppo", world, tmp_path / "whole", *flags)
    assert launcher.run("ppo", argv, tmp_path / "whole") == 0, launcher.said()
    expected, out = outcome(tmp_path / "whole"), tmp_path / "run"
    argv = command("ppo", world, out, *flags)
    assert launcher.run("ppo", [*argv, "--stop-after", 3], out) == 0, launcher.said()
    saved = torch.load(out / "checkpoint" / "step-0000003" / "state.pt", weights_only=True)
    state, moments = saved["state"], saved["optimizer"]["state"]
    assert len(state["critic"]) == (2 if critic == "shared" else 22)
    assert len(moments) == len(state["policy"]) + len(state["critic"])
    assert state["kl_coef"] not in (0.05, rows(out)[-1]["kl/coef"])
    assert state["best"]["step"] in (0, 2) and len(state["best"]["weights"]) > 10
    kill = random.Random(critic).randint(5, 40)
    assert launcher.run("ppo", [*argv, "--resume"], out, kill_at=kill) == -signal.SIGKILL
    assert launcher.run("ppo", [*argv, "--resume"], out) == 0, launcher.said()
    assert_same(out, expected)
    coefficients = [r["kl/coef"] for r in rows(out) if "kl/coef" in r]
    assert len(set(coefficients)) == 6


def test_an_alarm_is_final(launcher, world, tmp_path):
    """A run that a rule of watch.py ended after step 4 of 6 does not train on: killed three times on its way, once in the
    writing of its last weights, and resumed twice after its end, it has the weights, the log and the status of the run that
    was never killed. Asked for its reason after a step instead of before it, each resume would train one step more."""
    flags = ("--target", -1e9, "--eval-every", 4)  # reached at the second evaluation: steps 0 and 4
    argv = command("ppo", world, tmp_path / "whole", *flags)
    assert launcher.run("ppo", argv, tmp_path / "whole", kill_at=0) == 0, launcher.said()
    assert "stopped by watch.py after step 4: target_reached" in launcher.said()
    expected, done, out = outcome(tmp_path / "whole"), len(launcher.traced()), tmp_path / "run"
    assert rows(tmp_path / "whole")[-1]["step"] == 4
    argv = command("ppo", world, out, *flags)
    for kill in (done // 3, done // 3, done - 3):
        assert go_on(launcher, "ppo", argv, out, kill_at=min(kill, done)) in (-signal.SIGKILL, 0)
    for _ in range(2):
        assert launcher.run("ppo", [*argv, "--resume"], out) == 0, launcher.said()
        assert "target_reached" in launcher.said()
        assert_same(out, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_longer_plan_may_be_resumed(stage, launcher, world, tmp_path):
    """--steps may grow: with a constant rate, 3 steps and then 6 are 6 steps. It may not shrink."""
    flags = ("--schedule", "constant", "--warmup", 0, "--eval-every", 0)
    flags += (
        ("--restore", "last") if stage in ("ppo", "grpo_rubric") else ()
    )  # else the end of the short plan is a validation more
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    assert launcher.run(stage, command(stage, world, whole, *flags), whole) == 0
    argv = command(stage, world, grown, *flags)
    assert launcher.run(stage, [*argv, "--steps", 3], grown) == 0
    assert launcher.run(stage, [*argv, "--steps", 6, "--resume"], grown) == 0, launcher.said()
    assert outcome(grown)["weights"] == outcome(whole)["weights"]
    assert launcher.run(stage, [*argv, "--steps", 4, "--resume"], grown) == 2
    assert "--steps 4: this run is at step 6 already" in launcher.said()


# ---- killed ----


@pytest.mark.parametrize("stage", RESUMED)
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_again_and_again(stage, seed, launcher, world, unstopped, tmp_path):
    """At least five SIGKILLs at random moments of one run, --resume after each; --save-every 1 puts many of them inside
    a checkpoint. What comes out in the end is the run that was never killed."""
    chance, out, kills, code = random.Random(f"{stage}{seed}"), tmp_path / "run", [], -9
    argv = command(stage, world, out)
    while code != 0:
        latest = 60 if len(kills) < 8 else 10**9  # then let it end
        code = go_on(launcher, stage, argv, out, kill_at=chance.randint(1, latest))
        assert code in (-signal.SIGKILL, 0), launcher.said()
        kills += [launcher.traced()[-1]] if code else []
    assert len(kills) >= 5
    assert_same(out, unstopped[stage][0])
    stale = [str(p) for p in out.rglob("*") if p.name.startswith(".")]
    assert stale == [], f"left behind after {kills}"


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_that_an_alarm_ended_stays_ended(rank, launcher, world, tmp_path):
    """grpo_rubric.py with a target that the evaluation of step 2 of 6 reaches, killed three times at random moments on its
    way: the run that was never killed, to the bit. Two more --resume train no step 3 and change nothing; the reason to stop
    lies in the checkpoint, and forgotten it would cost one step each."""
    chance, out, whole = random.Random(rank), tmp_path / "run", tmp_path / "whole"
    flags = ("--target", -1, "--lora-rank", rank)
    argv = command("grpo_rubric", world, whole, *flags)
    assert launcher.run("grpo_rubric", argv, whole) == 0, launcher.said()
    assert [r["step"] for r in rows(whole)] == [0, 1, 2, 2]
    argv = command("grpo_rubric", world, out, *flags)
    for kill_at in (*(chance.randint(1, 45) for _ in range(3)), None, None, None):
        code = go_on(launcher, "grpo_rubric", argv, out, kill_at=kill_at)
        assert code == (-signal.SIGKILL if kill_at else 0), launcher.said()
        if not kill_at:
            assert "stopped by watch.py after step 2: target_reached" in launcher.said()
            assert_same(out, outcome(whole))
            assert (out / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()


@pytest.mark.parametrize("stage", STAGES)
def test_killed_by_the_clock(stage, launcher, world, tmp_path):
    """The same from outside: five times, when a new step is in the log, SIGKILL a random moment later. Twenty steps, so
    that a machine which is slow to deliver the signal still finds a run to kill."""
    chance, out, code = random.Random(stage), tmp_path / "run", -9
    whole, steps = tmp_path / "whole", ["--steps", 20]
    assert launcher.run(stage, command(stage, world, whole, *steps), whole) == 0, launcher.said()
    argv, log, kills = command(stage, world, out, *steps), out / "metrics.jsonl", 0
    while code != 0:
        pid = launcher.start(stage, [*argv, *(["--resume"] if kills else [])], out, pause=0.02)
        before = log.stat().st_size if log.exists() else 0
        while kills < 5 and Path(f"/proc/{pid}").exists():
            if log.exists() and log.stat().st_size > before:
                time.sleep(chance.uniform(0, 0.06))
                break
            time.sleep(0.001)
        if kills < 5:
            os.kill(pid, signal.SIGKILL)
        code = launcher.wait()
        assert code in (-signal.SIGKILL, 0), launcher.said()
        assert code or kills == 5, "the run ended before it was killed five times"
        kills += 1
    assert_same(out, outcome(whole))


def test_killed_at_every_point_of_a_checkpoint(launcher, world, unstopped, tmp_path):
    """The folder for step 4 is made, state.pt is opened, written by half, flushed, the folder renamed, step 2 moved away
    and removed: a kill at each of these leaves a whole checkpoint to go on from, never half a one that is chosen."""
    expected, trace = unstopped["sft"]
    made = [i for i, what in enumerate(trace) if what.startswith("os.mkdir /checkpoint/.writing")]
    points = range(made[3] + 1, made[4] + 1)  # counted from 1
    names = " ".join(trace[i - 1] for i in points)
    for word in ("os.mkdir", "open", "half of state.pt", "fsync", "os.rename", "os.rmdir"):
        assert word in names, f"no kill at {word}: {names}"
    for point in points:
        out = tmp_path / f"run{point}"
        argv = command("sft", world, out)
        assert launcher.run("sft", argv, out, kill_at=point) == -signal.SIGKILL
        # the same things in the same order, or the points above name others
        assert launcher.traced() == trace[:point]
        steps = sorted(p.name for p in (out / "checkpoint").glob("step-*"))
        assert steps[-1] in ("step-0000003", "step-0000004")
        assert launcher.run("sft", [*argv, "--resume"], out) == 0, launcher.said()
        assert int(steps[-1][-7:]) == int(launcher.said().partition("resumed at step ")[2][:1])
        assert_same(out, expected)


def test_killed_while_the_model_is_saved(launcher, world, unstopped, tmp_path):
    """At the end the trained weights replace the start's, file by file. Killed at the rename of the weights, or with a
    half-written temporary folder, the run goes on from its last checkpoint and writes them whole; nothing is left over."""
    expected, trace = unstopped["reward_train"]
    last = max(i for i, what in enumerate(trace) if "checkpoint/" in what)
    points = [i + 1 for i, what in enumerate(trace) if i > last and "saving-" in what]
    assert len(points) > 8
    for point in (points[0], points[len(points) // 2], points[-1]):
        out = tmp_path / f"run{point}"
        argv = command("reward_train", world, out)
        assert launcher.run("reward_train", argv, out, kill_at=point) == -signal.SIGKILL
        assert launcher.run("reward_train", [*argv, "--resume"], out) == 0, launcher.said()
        assert "resumed at step 6" in launcher.said()
        assert_same(out, expected)
        assert [p.name for p in out.iterdir() if p.name.startswith(".")] == []


def test_killed_before_the_first_checkpoint(launcher, world, unstopped, tmp_path):
    """With --save-every 100 a kill in step 2 leaves no checkpoint. --resume starts from step 0, with one row for step 0 in
    the log and not two."""
    out = tmp_path / "run"
    argv = [*command("dpo", world, out), "--save-every", 100]
    trace = unstopped["dpo"][1]
    logged = [i + 1 for i, what in enumerate(trace) if what == "write /metrics.jsonl"]
    assert launcher.run("dpo", argv, out, kill_at=logged[1]) == -signal.SIGKILL
    assert not list((out / "checkpoint").glob("step-*"))
    assert launcher.run("dpo", [*argv, "--resume"], out) == 0, launcher.said()
    assert "resumed at step 0" in launcher.said()
    assert_same(out, unstopped["dpo"][0])


def test_killed_around_the_reference_pass(launcher, world, unstopped, tmp_path):
    """In the pass itself nothing is written yet; then its log-probs are, before the first step. A kill in the pass, one at
    each point of that file, and one in the pass that the resumed run makes again where the file is missing."""
    expected, trace = unstopped["dpo"]
    points = [i + 1 for i, what in enumerate(trace) if "reference.pt" in what or "half" in what]
    points = [i for i in points if i < trace.index("write /metrics.jsonl")]
    assert len(points) >= 4, trace[:40]
    for point in points:
        out = tmp_path / f"run{point}"
        argv = command("dpo", world, out)
        assert launcher.run("dpo", argv, out, kill_in_reference=2) == -signal.SIGKILL
        assert not out.exists(), "nothing is written before the reference is known"
        assert go_on(launcher, "dpo", argv, out, kill_at=point) == -signal.SIGKILL
        known = (out / "checkpoint" / "reference.pt").exists()
        code = go_on(launcher, "dpo", argv, out, kill_in_reference=1)
        assert code == (0 if known else -signal.SIGKILL), launcher.said()
        assert known or go_on(launcher, "dpo", argv, out) == 0, launcher.said()
        assert_same(out, expected)
        assert [p for p in out.rglob(".*")] == []


# ---- asked to stop ----


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_finishes_the_step_and_saves(stage, number, launcher, world, unstopped, tmp_path):
    """A queue's SIGTERM, or the first Ctrl-C: the step is finished, a checkpoint written, the exit code is 128 + signal
    (so that a script does not take it for success), and --resume goes on."""
    out = tmp_path / "run"
    argv = [*command(stage, world, out), "--save-every", 100]
    pid = launcher.start(stage, argv, out, pause=0.3)
    stop_when(pid, out, 2, number)
    assert launcher.wait() == 128 + number, launcher.said()
    done = rows(out)[-1]["step"]
    assert 2 <= done < 6
    assert [p.name for p in (out / "checkpoint").glob("step-*")] == [f"step-{done:07d}"]
    assert "stopping after this step" in launcher.said()
    assert stopped_after(done) in launcher.said()
    assert launcher.run(stage, [*argv, "--resume"], out) == 0, launcher.said()
    assert_same(out, unstopped[stage][0])


def stop_when(pid, out, step, number):
    """Send the signal as soon as the step is logged."""
    log = out / "metrics.jsonl"
    while Path(f"/proc/{pid}").exists():
        if log.exists() and f'"step": {step},' in log.read_text():
            return os.kill(pid, number)
        time.sleep(0.002)
    raise AssertionError("the run ended before its step was logged")


def test_second_ctrl_c_stops_at_once(launcher, world, tmp_path):
    """Who presses Ctrl-C twice does not want to wait for the step: exit code 130, no traceback."""
    out = tmp_path / "run"
    pid = launcher.start("sft", command("sft", world, out), out, pause=2)
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.01)
    for _ in range(2):
        time.sleep(0.3)
        os.kill(pid, signal.SIGINT)
    assert launcher.wait() == 130
    assert "Traceback" not in launcher.said()


def test_the_command_itself(world, tmp_path):
    """Once without the launcher: `python dpo.py …` as typed, SIGTERM, exit code 143, then the same with --resume."""
    out = tmp_path / "run"
    argv = [sys.executable, str(REPO / "dpo.py"), *map(str, command("dpo", world, out))]
    argv += ["--steps", "2000", "--eval-every", "0", "--save-every", "5000"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=-1, stderr=-1, text=True)
    stop_when(run.pid, out, 1, signal.SIGTERM)
    printed, complained = run.communicate(timeout=120)
    assert run.returncode == 143, complained
    assert (
        "Traceback" not in complained and "continue with the same command and --resume" in printed
    )
    done = rows(out)[-1]["step"]
    argv += ["--resume", "--stop-after", str(done + 1)]
    run = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"resumed at step {done}" in run.stdout and rows(out)[-1]["step"] == done + 1


# ---- a full disk ----


@pytest.mark.parametrize("stage", STAGES)
def test_full_disk(stage, launcher, world, unstopped, tmp_path):
    """No room for a checkpoint, or for the weights: an error without a traceback, status 2, and after making room --resume
    goes on from the last whole checkpoint."""
    out = tmp_path / "run"
    argv = command(stage, world, out)
    size = len(unstopped[stage][0]["weights"])
    assert launcher.run(stage, argv, out, largest_file=size // 2) == 2  # not even the start fits
    assert "error: " in launcher.said() and "Traceback" not in launcher.said()
    assert launcher.run(stage, [*argv, "--overwrite"], out, largest_file=int(size * 1.5)) == 2
    assert "error: " in launcher.said() and "Traceback" not in launcher.said()
    assert launcher.run(stage, [*argv, "--resume"], out) == 0, launcher.said()
    assert_same(out, unstopped[stage][0])
