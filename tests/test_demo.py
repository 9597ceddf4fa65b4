"""The loop of `make demo`, its commands as the Makefile prints them, with a few steps each.

The loop at its full size is `make report`; what the committed reports of three seeds reach is held here.
"""

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
SMALL = {  # the last of two flags counts
    "reward_train.py": "--pairs data/prefs.jsonl --steps 3 --eval-every 0",
    "dpo.py": "--pairs data/prefs.jsonl --steps 3 --eval-every 0",
    "ppo.py": "--steps 1 --rollouts 32",
    "grpo_rubric.py": "--steps 1",
    "fairness.py": "--names-per-cell 1 --resumes 2 --generated-names 1 --generated-resumes 2",
    "evaluate.py": "--n 10 --bon 2",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project's own files, without what earlier runs left."""
    target = tmp_path_factory.mktemp("clone") / "feedbackloop"
    skip = shutil.ignore_patterns(".git", ".venv", "runs", ".*_cache", "__pycache__")
    return shutil.copytree(REPO, target, ignore=skip)


@pytest.fixture(scope="module")
def printed(copy):
    """All that a small `make demo` prints, as lines."""
    dry = ["make", "-n", "demo", "PY=python"]
    lines = subprocess.run(dry, cwd=copy, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^python (.*)$", lines, re.M)
    assert [line.split()[0] for line in commands] == list(SMALL)
    shown = []
    for line in commands:
        line, *others = re.split(r" > | \|\| ", line)
        line += f" {SMALL[line.split()[0]]}"
        done = subprocess.run(
            [sys.executable, *shlex.split(line)], cwd=copy, capture_output=True, text=True
        )
        assert done.returncode in ((0, 3) if others == ["[ $? = 3 ]"] else (0,)), (
            f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
        into_a_file = others and others[0].startswith("runs/")
        shown += [line] + ([] if into_a_file else done.stdout.splitlines())
    return [*shown, "open …"]


@pytest.mark.slow
def test_the_demo_ends_with_the_answer(printed):
    """Under 150 lines with the 15 evaluations that a full run has more; the models, their scores,
    wins and verdicts stand in the last ten."""
    assert len(printed) + 15 < 150
    end = "\n".join(printed[-10:])
    for name in ("Base", "DPO", "PPO"):
        assert re.search(rf"^{name} .*\[.*(the baseline|better|worse|inconclusive)$", end, re.M)


@pytest.mark.slow
def test_the_audit_has_verdicts(printed, copy):
    """The audit leaves a report whose verdicts are of the four kinds."""
    text = (copy / "runs" / "demo" / "fairness" / "report.json").read_text("utf-8")
    found = re.findall(r'"verdict": "([^"]+)"', text)
    kinds = ("difference found", "equivalent within", "inconclusive", "not measured")
    assert found and all(verdict.startswith(kinds) for verdict in found)


@pytest.mark.slow
def test_run_folders_open_in_plain_transformers(printed, copy):
    """AutoModel classes open both with no missing key, and the tokenizer brings its template."""
    kinds = {"dpo": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        folder = copy / "runs" / "demo" / name
        model, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(folder).chat_template
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    assert math.isfinite(model.config.reward_mean) and model.config.reward_std > 0


def read_screen(screen, shown):
    with contextlib.suppress(OSError):  # EIO: the other end was closed
        while data := os.read(screen, 4096):
            shown.append(data.decode(errors="replace"))


@pytest.mark.slow
def test_dpo_on_a_terminal(copy):
    """Preflight at log 2, a bar on the terminal, before and after, a folder that loads."""
    screen, stderr = pty.openpty()
    # 24 rows of 120 columns: a bar draws nothing on a terminal without a size
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    argv = [sys.executable, "dpo.py", "--pairs", "data/prefs.jsonl", "--steps", "3"]
    process = subprocess.Popen(argv, cwd=copy, stdout=subprocess.PIPE, stderr=stderr, text=True)
    os.close(stderr)
    shown = []
    reader = threading.Thread(target=read_screen, args=(screen, shown), daemon=True)
    reader.start()
    out, _ = process.communicate()
    reader.join(timeout=10)
    assert process.returncode == 0, out[-2000:]
    assert "loss before step one: 0.6931, expected 0.6931" in out
    assert re.search(r"eval/loss +before \S+  after \S+", out)
    assert "dpo: 100%" in "".join(shown)
    AutoModelForCausalLM.from_pretrained(copy / "runs" / "dpo")


# ---- the committed reports: three seeds of the loop at its full size ----


def committed(kind):
    files = sorted(REPORTS.glob(f"{kind}-seed-*.json"))
    assert len(files) == 3
    return [json.loads(f.read_text("utf-8")) for f in files]


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("name, gain, wins", [("dpo", 0.20, 0.75), ("ppo", 0.15, 0.65)])
def test_policies_reach_their_targets(name, gain, wins):
    """Verdict better in each of three seeds, a KL above 0 that is stated; in the mean, DPO gains .20 of
    utility and wins .75 of the comparisons with the base, PPO on the reward model alone .15 and .65."""
    gains, rates = [], []
    for report in committed("compare"):
        base, *others = report["models"]
        policy = next(row for row in others if row["name"].endswith(name))
        pair = next(
            row
            for row in report["comparisons"]
            if row["scorer"] == "gold" and (row["a"], row["b"]) == (policy["name"], base["name"])
        )
        assert pair["verdict"] == "better"
        assert policy["kl"]["low"] > 0 and base["kl"]["value"] == 0
        gains.append(policy["gold"]["value"] - base["gold"]["value"])
        rates.append(pair["win_rate"]["value"])
    assert mean(gains) >= gain and mean(rates) >= wins


def test_rubric_grpo_reaches_its_target():
    """On prompts held out to the end, at temperature 1: up by .25 in each seed, .80 in the mean."""
    reports = committed("grpo")
    for report in reports:
        assert report["test_after"]["score"] >= report["test_before"]["score"] + 0.25
    assert mean([report["test_after"]["score"] for report in reports]) >= 0.80


def test_reward_model_beats_the_longer_answer():
    """≥ .75 right on unseen roles, .10 above "the longer answer wins"; tempered ECE ≤ .08."""
    for report in committed("reward"):
        assert report["accuracy"]["value"] >= 0.75
        assert report["accuracy"]["value"] >= report["length_baseline"]["value"] + 0.10
        assert report["calibration_tempered"]["ece"] <= 0.08
