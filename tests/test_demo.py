"""D9: the demo as a new user runs it, in full, in a copy of the project: its numbers are the committed ones and reach the targets."""

import contextlib
import fcntl
import json
import math
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

REPO = Path(__file__).parent.parent
REPORTS = REPO / "reports" / "demo"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project's own files, without what earlier runs left."""
    target = tmp_path_factory.mktemp("clone") / "feedbackloop"
    skip = shutil.ignore_patterns(".git", ".venv", "runs", ".*_cache", "__pycache__")
    return shutil.copytree(REPO, target, ignore=skip)


def run(copy, line, terminal=False):
    """With `terminal` stderr is one, as for a user: bars are drawn there alone, not into a log file.

    A line that ends in `|| [ $? = 3 ]` may be stopped by watch.py: the best weights are written all the same.
    """
    line, _, stopped = line.partition(" || ")
    assert stopped in ("", "[ $? = 3 ]"), stopped
    screen, stderr = pty.openpty() if terminal else (None, subprocess.PIPE)
    if terminal:  # 24 rows of 120 columns: a bar draws nothing on a terminal without a size
        fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *shlex.split(line)], cwd=copy, stdout=subprocess.PIPE, stderr=stderr, text=True
    )  # fmt: skip
    shown, reader = [], None
    if terminal:
        os.close(stderr)
        reader = threading.Thread(target=read_screen, args=(screen, shown), daemon=True)
        reader.start()
    out, err = process.communicate()
    if terminal:
        reader.join(timeout=10)
        err = "".join(shown)
    done = subprocess.CompletedProcess(line, process.returncode, out, err)
    assert done.returncode in ((0, 3) if stopped else (0,)), (
        f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )
    return done


def read_screen(screen, shown):
    with contextlib.suppress(OSError):  # EIO: the other end was closed
        while data := os.read(screen, 4096):
            shown.append(data.decode(errors="replace"))


@pytest.fixture(scope="module")
def demo(copy):
    """`make demo`, its commands as the Makefile prints them: (report of the models, report of the reward model)."""
    printed = subprocess.run(
        ["make", "-n", "demo", "PY=python"], cwd=copy, capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r"^python (.*)$", printed, re.M)
    assert [line.split()[0] for line in commands] == [
        "reward_train.py", "dpo.py", "ppo.py", "grpo_rubric.py", "evaluate.py", "evaluate.py", "fairness.py"
    ]  # fmt: skip
    for line in commands:
        run(copy, line)
    read = lambda name: json.loads((copy / "runs" / "demo" / name / "report.json").read_text())  # noqa: E731
    return read("report"), read("reward-report")


def of_model(report, name):
    return next(row for row in report["models"] if re.search(rf"{name}$", row["name"]))


def against_base(report, name):
    return next(
        row
        for row in report["comparisons"]
        if row["scorer"] == "gold" and row["a"].endswith(name) and row["b"].endswith("tiny-base")
    )


@pytest.mark.parametrize("name, gain", [("dpo", 0.15), ("ppo", 0.10)])
def test_policies_are_better_on_unseen_roles(demo, name, gain):
    """Verdict better, utility up (DPO .28 to .30, PPO on the reward model alone .17 to .21 in the reports), a KL above 0 that is stated."""
    report, _ = demo
    base, policy = of_model(report, "tiny-base"), of_model(report, name)
    assert against_base(report, name)["verdict"] == "better"
    assert policy["gold"]["value"] >= base["gold"]["value"] + gain
    assert policy["kl"]["low"] > 0 and base["kl"]["value"] == 0


@pytest.mark.parametrize("name, gain, wins", [("dpo", 0.20, 0.75), ("ppo", 0.15, 0.65)])
def test_policies_reach_their_targets_in_the_committed_reports(name, gain, wins):
    """DPO: utility ≥ base + .20, win rate ≥ .75; PPO: + .15 and .65; means of three seeds. (PPO's were + .25 and .80 while it
    was rewarded by DPO's implicit reward, too; on the reward model alone it ends where best of 16 does.)

    Of the committed reports, for a fresh run may differ from them by its tolerance (`test_numbers_are_the_committed_ones`),
    and the margin is narrower than that."""
    reports = [json.loads(f.read_text()) for f in sorted(REPORTS.glob("compare-seed-*.json"))]
    assert len(reports) == 3
    ends = [(of_model(r, name), of_model(r, "tiny-base"), against_base(r, name)) for r in reports]
    assert sum(m["gold"]["value"] - base["gold"]["value"] for m, base, _ in ends) / 3 >= gain
    assert sum(pair["win_rate"]["value"] for *_, pair in ends) / 3 >= wins


def test_rubric_grpo_keeps_more_of_its_rubrics(demo, copy):
    """On prompts held out to the end the share of criteria met, at temperature 1, is up by .25 and more (.40 to .82 where
    the report was made); in the committed reports it reaches .80 in the mean of three seeds."""
    summary = json.loads((copy / "runs" / "demo" / "grpo" / "summary.json").read_text())
    assert summary["test_after"]["score"] >= summary["test_before"]["score"] + 0.25
    ends = [json.loads(f.read_text())["test_after"]["score"] for f in sorted(REPORTS.glob("grpo-seed-*.json"))]  # fmt: skip
    assert len(ends) == 3 and sum(ends) / 3 >= 0.80


def test_the_audit_has_verdicts(demo, copy):
    """The last command of the demo leaves a report whose verdicts are of the four kinds."""
    text = (copy / "runs" / "demo" / "fairness" / "report.json").read_text()
    found = re.findall(r'"verdict": "([^"]+)"', text)
    kinds = ("difference found", "equivalent within", "inconclusive", "not measured")
    assert found and all(verdict.startswith(kinds) for verdict in found)


def test_reward_model_beats_the_longer_answer(demo):
    """Accuracy ≥ .75 on unseen roles and ≥ .10 above "the longer answer wins"; ECE ≤ .08."""
    _, report = demo
    assert report["accuracy"]["value"] >= 0.75
    assert report["accuracy"]["value"] >= report["length_baseline"]["value"] + 0.10
    assert report["calibration"]["ece"] <= 0.08


def test_numbers_are_the_committed_ones(demo):
    """A fresh run of seed 0 lands within .05 of the report in reports/demo; another processor may round otherwise.
    PPO trains on what it drew, so a rounding that changes one draw changes all that follow: .08."""
    report, reward = demo
    committed = json.loads((REPORTS / "compare-seed-0.json").read_text())
    for name, apart in (("tiny-base", 0.05), ("dpo", 0.05), ("ppo", 0.08)):
        here = of_model(report, name)["gold"]["value"]
        there = of_model(committed, name)
        assert here == pytest.approx(there["gold"]["value"], abs=apart), name
    there = json.loads((REPORTS / "reward-seed-0.json").read_text())
    assert reward["accuracy"]["value"] == pytest.approx(there["accuracy"]["value"], abs=0.05)


def test_run_folders_open_in_plain_transformers(demo, copy):
    """AutoModel classes open both folders with no missing key, and the tokenizer brings its chat template."""
    for name, kind in (
        ("dpo", AutoModelForCausalLM),
        ("reward", AutoModelForSequenceClassification),
    ):
        folder = copy / "runs" / "demo" / name
        model, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(folder).chat_template
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    assert math.isfinite(model.config.reward_mean) and model.config.reward_std > 0


def test_dpo_runs_with_no_other_flag(copy):
    """`python dpo.py --pairs data/prefs.jsonl`: preflight at log 2, a bar, before and after, a folder that loads."""
    done = run(copy, "dpo.py --pairs data/prefs.jsonl", terminal=True)
    assert "loss before step one: 0.6931, expected 0.6931" in done.stdout
    assert re.search(r"eval/loss +before \S+  after \S+", done.stdout)
    assert "dpo: 100%" in done.stderr
    AutoModelForCausalLM.from_pretrained(copy / "runs" / "dpo")
