"""`make demo`: its commands at toy size, and the numbers of the full one as they are committed.

The full demo takes minutes and belongs to `make report`, which ends with the tests here called
`committed`: they hold reports/demo to its targets.
"""

import re
import subprocess
import sys
from statistics import fmean

import pytest

from conftest import REPO, copy_of_the_repository
from parts import files, stats
from tiny import read_json, write_rows

SMALL = """#!/bin/sh
train="--steps 2 --batch-size 4 --eval-every 0 --device cpu"
case "$*" in
reward_train.py*) set -- "$@" $train;;
dpo.py*) set -- "$@" $train --max-new-tokens 4;;
ppo.py*) set -- "$@" $train --rollouts 4 --max-new-tokens 4;;
grpo_rubric.py*) set -- "$@" --steps 2 --group-size 2 --groups-per-batch 2 --max-new-tokens 4;;
evaluate.py*) set -- "$@" --n 4 --samples 1 --bon 2 --max-new-tokens 8;;
fairness.py*) set -- "$@" --per-cell 5 --resumes 5;;
esac
"""
EVERY = {"prefs_train": 200, "rank_train": 200, "prompts": 20}  # one row of so many is kept


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(what `make demo` printed, its folder) in a copy with few rows and few steps."""
    copy = copy_of_the_repository(tmp_path_factory.mktemp("clone") / "feedbackloop")
    for name, every in EVERY.items():
        path = copy / f"data/{name}.jsonl"
        write_rows(path, list(files.read_jsonl(path))[::every])
    rubrics = read_json(copy / "data/rubrics.json").items()
    files.write_json(copy / "data/rubrics.json", {split: rows[::20] for split, rows in rubrics})
    python = copy / "python"
    python.write_text(f'{SMALL}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = ["make", "demo", f"PY={python}"]
    done = subprocess.run(command, cwd=copy, stdout=-1, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout, copy / "runs" / "demo"


@pytest.mark.slow
def test_every_command_of_the_loop_runs(demo):
    """At the end stands the answer of the reports, whose verdicts are of the known kinds."""
    output, folder = demo
    run = re.findall(r"^\S+/python (\w+)\.py", output, re.M)
    assert run == "reward_train dpo ppo grpo_rubric fairness evaluate".split()
    assert all((folder / f"{name}/report.html").is_file() for name in ("report", "fairness"))
    verdicts = re.findall(r'"verdict": "([^"]+)"', (folder / "fairness/report.json").read_text())
    kinds = (stats.FOUND, stats.NONE, stats.OPEN, stats.UNMEASURED, "reference")
    assert verdicts and all(verdict.startswith(kinds) for verdict in verdicts)
    assert read_json(folder / "report" / "report.json")["answer"][0] in output[-2000:]


# ---- the full demo: what `make report` has written ----


def committed(kind):
    found = [read_json(path) for path in sorted(REPO.glob(f"reports/demo/{kind}-seed-?.json"))]
    assert len(found) == 3
    return found


def called(text, name):
    """Is it the model? The committed reports call it by its folder, today's by --name."""
    return text.lower().endswith(name)


def model_of(report, name):
    rows = report["models"]
    return next(row for row in rows if called(row.get("name") or row["model"], name))


def utility(report, name):
    return model_of(report, name)["gold"]["value"]


@pytest.mark.parametrize("name, gain, wins", [("dpo", 0.20, 0.75), ("ppo", 0.15, 0.65)])
def test_committed_policies_reach_their_targets(name, gain, wins):
    """Utility above the base and win rate on unseen roles in the mean of three seeds, better in
    each verdict, at a KL that is stated."""
    reports, rates = committed("compare"), []
    for report in reports:
        pairs = [row for row in report["comparisons"] if row.get("scorer", "gold") == "gold"]
        (pair,) = (row for row in pairs if called(row["a"], name) and called(row["b"], "base"))
        rates.append(pair.get("win_rate", pair.get("wins"))["value"])
        assert pair["verdict"] == "better" and model_of(report, name)["kl"]["low"] > 0
    assert fmean(utility(r, name) - utility(r, "base") for r in reports) >= gain
    assert fmean(rates) >= wins


def test_committed_reward_model_and_rubrics():
    """Reward model: accuracy ≥ .75 on unseen roles, ≥ .10 above "the longer answer wins".
    GRPO: .80 of the criteria of held-out prompts in the mean, .25 up in each."""
    for report in committed("reward"):
        least = max(0.75, report["length_baseline"]["value"] + 0.10)
        assert report["accuracy"]["value"] >= least
    scores = [(r["test_before"]["score"], r["test_after"]["score"]) for r in committed("grpo")]
    assert all(after >= before + 0.25 for before, after in scores)
    assert fmean(after for _, after in scores) >= 0.80
