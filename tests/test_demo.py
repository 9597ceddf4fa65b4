"""`make demo`: its commands at toy size."""

import re
import subprocess
import sys

import pytest

from conftest import copy_of_the_repository
from parts import files
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
    """At the end stands the answer of the reports."""
    output, folder = demo
    assert re.findall(r"^\[(\d)/6\]", output, re.M) == list("123456")
    assert all((folder / f"{name}.txt").is_file() for name in ("reward", "dpo", "ppo", "grpo"))
    assert all((folder / f"{name}/report.html").is_file() for name in ("report", "fairness"))
    assert read_json(folder / "report" / "report.json")["answer"][0] in output[-2000:]
    page = (folder / "index.html").read_text()
    links = re.findall('href="([^"]+)"', page)
    assert {"report/report.html", "fairness/report.html", "dpo/"} <= {*links}
    assert all((folder / link).exists() for link in links)
