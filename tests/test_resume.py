"""A run that was stopped, killed or cut off ends in the same bits as one that never was.

Every run here is a process of its own, so that a SIGKILL is one. To keep the file fast they are
forked from one process that has imported torch and the stages (`Launcher`). A killer that waits for
the clock would hit the imports on a slow machine and miss the run on a fast one: a child counts
what it does to its run folder (every open, mkdir, rename, remove, flush and line of the log, of
which it writes half) and kills itself at a chosen or a random one of them. What a toy trainer shows
(each point of a saved model, of an opened run; signals; a torn log) is in test_runs.py.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from test_agent import echo, line
from tiny import pair_rows, tiny_model, tiny_reward_model, write_pairs, write_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; forks")
REPO = Path(__file__).resolve().parent.parent
STAGES = ["sft", "reward_train", "dpo", "ppo", "grpo_rubric", "grpo_agent"]
QUIET = ["--patience", 0, "--on-hack", "warn"]  # watch.py never stops these runs
PPO = ["--rollouts", 7, "--kl-target", 2, *QUIET]
GRPO = ["--group-size", 2, "--num-substeps", 2, "--beta", 0.05, *QUIET]
CHECKS = [
    {"check": "regex:match", "pattern": "[aeiou]"},
    {"check": "text:max_chars", "max_chars": 4},
]
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}  # the columns that may differ
KILLED = -signal.SIGKILL

LAUNCHER = r'''
import io, json, os, signal, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch, transformers, common, sft, reward_train, dpo, ppo, grpo_rubric, grpo_agent
from parts import files
import transformers.models.llama.modeling_llama  # what each child would import anew
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
torch.set_num_threads(1)
ppo.ROLLOUTS_EVERY = 2  # so that six steps show it


def count_and_kill(folder, kill_at, trace):
    """SIGKILL at the kill_at-th thing done to the folder; the trace file gets a line for each."""
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
        happened("half of a checkpoint", lambda: os.truncate(file.fileno(), file.tell() // 2))

    sys.addaudithook(hook)
    files.open, os.fsync, torch.save = opened, flushed, saved


def child(job):
    out = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
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
    """Runs a stage in a forked process."""

    def __init__(self, folder):
        self.log, self.trace = folder / "log.txt", folder / "trace.txt"
        paths = json.dumps([str(REPO), str(REPO / "tests")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        argv = [sys.executable, "-u", "-c", LAUNCHER, paths]
        self.process = subprocess.Popen(argv, stdin=-1, stdout=-1, text=True, env=env)
        assert self.process.stdout.readline() == "ready\n"

    def run(self, stage, argv, out, kill_at=None, largest_file=0):
        """The exit code; kill_at: the number of the thing done to `out` that is its last."""
        job = {"stage": stage, "argv": [str(a) for a in argv], "folder": str(out)}
        job |= {"kill_at": kill_at, "largest_file": largest_file}
        job |= {"log": str(self.log), "trace": str(self.trace)}
        self.trace.unlink(missing_ok=True)
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        return int(self.process.stdout.readline())

    def said(self):
        return self.log.read_text()

    def traced(self):
        """Without the random part of temporary names, which differs from run to run."""
        text = re.sub(r"(\.writing-)\w+", r"\1", self.trace.read_text())
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
    """A tiny model, a reward model, and 18 pairs: batches of 4, so that six steps cross an epoch
    and meet its short last batch; of nine rubrics seven train, two per step."""
    folder = tmp_path_factory.mktemp("world")
    rubrics = [{"prompt": row["prompt"], "rubrics": CHECKS} for row in pair_rows(9)]
    return {
        "model": tiny_model("llama", folder, max_position_embeddings=512),
        "reward": tiny_reward_model("llama", folder / "reward"),
        "data": write_pairs(folder / "pairs.jsonl", 18),
        "env": echo(folder),
        "rubrics": write_rows(folder / "rubrics.jsonl", rubrics),
    }


def command(stage, world, out, *flags):
    if stage == "grpo_agent":
        argv = line(world["model"], world["env"], out, "--steps", 6, "--lr", 1e-3)
        return [*argv, *flags]
    data = {"sft": "--data", "ppo": "--prompts", "grpo_rubric": "--data"}.get(stage, "--pairs")
    file = world["rubrics" if stage == "grpo_rubric" else "data"]
    argv = [data, file, "--model", world["model"], "--lr", 1e-3]
    argv += ["--out", out, "--batch-size", 4, "--steps", 6, "--eval-every", 2, "--save-every", 1]
    argv += GRPO if stage == "grpo_rubric" else ["--eval-fraction", 0.2]
    argv += [] if stage == "reward_train" else ["--max-new-tokens", 3]
    argv += PPO + ["--reward-model", world["reward"]] if stage == "ppo" else []
    return [*argv, *flags]


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def outcome(out):
    """Log, reward statistics, samples and weights, without the columns of the clock."""
    config = json.loads((out / "config.json").read_text())
    metrics = [{k: v for k, v in row.items() if k not in CLOCK} for row in rows(out)]
    logs = [out / "samples.jsonl", out / "rollouts.jsonl"]
    texts = [log.read_text() if log.exists() else "" for log in logs]
    statistics = {k: v for k, v in config.items() if k.startswith("reward_")}
    return metrics, statistics, texts, (out / "model.safetensors").read_bytes()


def assert_same(out, expected):
    got = outcome(out)
    assert got[:3] == expected[:3]
    assert got[3] == expected[3], "the same log, but other weights"
    assert [str(p) for p in out.rglob(".*")] == [], "something is left behind"


@pytest.fixture(scope="module")
def unstopped(launcher, world, tmp_path_factory):
    """stage → (outcome of six steps in one go, what it does to its folder); made when asked for."""
    made = {}

    def of(stage):
        if stage not in made:
            out = tmp_path_factory.mktemp("unstopped") / "run"
            argv = command(stage, world, out)
            assert launcher.run(stage, argv, out, kill_at=0) == 0, launcher.said()
            steps = [row["step"] for row in rows(out)]
            assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]  # an evaluation is a row of its own
            made[stage] = outcome(out), launcher.traced()
        return made[stage]

    return of


def go_on(launcher, stage, argv, out, **how):
    """What a user does after a crash: --resume; where there is no run yet, the plain command."""
    code = launcher.run(stage, [*argv, "--resume"], out, **how)
    if code == 2 and "holds no run" in launcher.said():
        code = launcher.run(stage, [*argv, "--overwrite"], out, **how)
    return code


def finished(launcher, stage, world, out, *flags):
    """The outcome of the run in one go."""
    assert launcher.run(stage, command(stage, world, out, *flags), out) == 0, launcher.said()
    return outcome(out)


# ---- killed ----


@pytest.mark.parametrize("stage", STAGES)
def test_killed_again_and_again(stage, launcher, world, unstopped, tmp_path):
    """Stopped after step 1, then five SIGKILLs at random moments of one run, --resume after each;
    --save-every 1 puts many of them inside a checkpoint. Forgotten moments, a restarted schedule, a
    batch drawn twice or a reference built from the resumed policy all show here."""
    chance, out, kills = random.Random(stage), tmp_path / "run", []
    argv = command(stage, world, out)
    assert launcher.run(stage, [*argv, "--stop-after", 1], out) == 0, launcher.said()
    assert "stopped after step 1 of 6; its weights are in" in launcher.said()
    while len(kills) < 5:
        code = launcher.run(stage, [*argv, "--resume"], out, kill_at=chance.randint(1, 45))
        assert code in (KILLED, 0), launcher.said()
        if code == 0:
            break
        kills.append(launcher.traced()[-1])
    assert len(kills) >= 3, kills
    assert launcher.run(stage, [*argv, "--resume"], out) == 0, launcher.said()
    assert "resumed at step " in launcher.said() and "preflight" not in launcher.said()
    assert_same(out, unstopped(stage)[0])


ADAPTED = [("reward_train", "--lora-rank", 4), ("dpo", "--lora-rank", 4)]
ADAPTED += [("ppo", "--critic", kind) for kind in ("rm", "policy", "shared")]


@pytest.mark.parametrize("stage, flag, value", ADAPTED)
def test_all_that_is_trained_resumes(stage, flag, value, launcher, world, tmp_path):
    """With --lora-rank a checkpoint holds the adapters alone, and until the end only adapter/ is
    written. PPO: policy, critic, the moments of both, the KL coefficient, which has moved by
    then, and the best weights so far (trl#2657). Three steps, a kill at a random moment, then
    --resume."""
    flags = (flag, value, "--lr", 3e-2 if stage == "ppo" else 1e-2, "--seed", 2)
    expected = finished(launcher, stage, world, tmp_path / "whole", *flags)
    out, kill = tmp_path / "cut", random.Random(value).randint(5, 40)
    argv = command(stage, world, out, *flags)
    assert launcher.run(stage, [*argv, "--stop-after", 3], out) == 0, launcher.said()
    saved = torch.load(out / "checkpoint" / "step-0000003.pt", weights_only=True)
    if stage == "ppo":
        state, moments = saved["state"], saved["optimizer"]["state"]
        assert len(state["critic"]) == (2 if value == "shared" else 22)
        assert len(moments) == len(state["policy"]) + len(state["critic"])
        assert state["kl_coef"] not in (0.05, rows(out)[-1]["kl/coef"])
        assert state["best"]["step"] in (0, 2) and len(state["best"]["weights"]) > 10
    else:
        assert (out / "adapter").is_dir() and not (out / "model.safetensors").exists()
    assert launcher.run(stage, [*argv, "--resume"], out, kill_at=kill) == KILLED
    assert launcher.run(stage, [*argv, "--resume"], out) == 0, launcher.said()
    assert_same(out, expected)


ENDED = [("ppo", -1e9, ("--eval-every", 4), 4), ("grpo_rubric", -1, ("--lora-rank", 4), 2)]


@pytest.mark.parametrize("stage, target, flags, last", ENDED)
def test_an_alarm_is_final(stage, target, flags, last, launcher, world, tmp_path):
    """A run that a rule of watch.py ended does not train on: killed on its way, once in the writing
    of its last weights, and resumed twice after its end, it has the weights, the log and the status
    of the run that was never killed. Forgotten, the reason would cost one step each."""
    flags, whole, out = ("--target", target, *flags), tmp_path / "whole", tmp_path / "run"
    argv = command(stage, world, whole, *flags)
    assert launcher.run(stage, argv, whole, kill_at=0) == 0, launcher.said()
    reason = f"stopped by watch.py after step {last}: target_reached"
    assert reason in launcher.said() and rows(whole)[-1]["step"] == last
    argv, done = command(stage, world, out, *flags), len(launcher.traced())
    for kill in (done // 3, done - 3):
        assert go_on(launcher, stage, argv, out, kill_at=kill) in (KILLED, 0)
    for _ in range(2):
        assert launcher.run(stage, [*argv, "--resume"], out) == 0, launcher.said()
        assert reason in launcher.said()
        assert_same(out, outcome(whole))
    if stage == "grpo_rubric":
        assert (out / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()


def test_full_disk(launcher, world, unstopped, tmp_path):
    """No room for the start, then none for a checkpoint: an error without a traceback, status 2,
    and after making room --resume goes on from the last whole checkpoint."""
    out, (expected, _) = tmp_path / "run", unstopped("sft")
    argv, size = command("sft", world, out), len(expected[3])
    for largest, flags in ((size // 2, []), (int(size * 1.5), ["--overwrite"])):
        assert launcher.run("sft", [*argv, *flags], out, largest_file=largest) == 2
        assert "error: " in launcher.said() and "Traceback" not in launcher.said()
    assert launcher.run("sft", [*argv, "--resume"], out) == 0, launcher.said()
    assert_same(out, expected)
