"""`make demo`: its commands at toy size, and the numbers of the full one as they are committed.

The full demo takes minutes and belongs to `make report`, which ends with the tests here called
`committed`: they hold reports/demo to its targets, and a fresh run to the numbers of the last
commit.
"""

import json
import re
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from conftest import REPO, copy_of_the_repository
from parts import files, stats
from tiny import read_json, write_rows

REPORTS = REPO / "reports" / "demo"
TRAIN = "--steps 2 --batch-size 4 --eval-every 0 --device cpu"
SMALL = f"""
reward_train.py*) set -- "$@" {TRAIN};;
dpo.py*) set -- "$@" {TRAIN} --max-new-tokens 4;;
ppo.py*) set -- "$@" {TRAIN} --rollouts 4 --max-new-tokens 4;;
grpo_rubric.py*) set -- "$@" --steps 2 --group-size 2 --groups-per-batch 2 --max-new-tokens 4;;
evaluate.py*) set -- "$@" --n 4 --samples 1 --bon 2 --max-new-tokens 8;;
fairness.py*) set -- "$@" --per-cell 5 --resumes 5;;
"""


def small_copy(folder):
    """A copy of the repository with few rows in the files that are trained on."""
    copy = copy_of_the_repository(folder / "feedbackloop")
    every = {"prefs_train": 200, "rank_train": 200, "prompts": 20}
    every |= {"prefs_biased": 100, "screen_biased": 100, "chat_pairs": 50}
    for name, n in every.items():
        path = copy / f"data/{name}.jsonl"
        write_rows(path, list(files.read_jsonl(path))[::n])
    rubrics = read_json(copy / "data/rubrics.json").items()
    files.write_json(copy / "data/rubrics.json", {split: rows[::20] for split, rows in rubrics})
    return copy


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    copy = small_copy(tmp_path_factory.mktemp("clone"))
    python = copy / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in {SMALL} esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = ["make", "demo", f"PY={python}"]
    done = subprocess.run(command, cwd=copy, stdout=-1, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return copy / "runs" / "demo", done.stdout


@pytest.mark.slow
def test_every_command_of_the_loop_runs(demo):
    folder, output = demo
    assert re.findall(r"^\[(\d)/6\]", output, re.M) == list("123456")
    assert all((folder / f"{name}.txt").is_file() for name in ("reward", "dpo", "ppo", "grpo"))
    for name in ("report/report", "fairness/report"):
        assert (folder / f"{name}.html").is_file() and (folder / f"{name}.json").is_file()
    verdicts = re.findall(r'"verdict": "([^"]+)"', (folder / "fairness/report.json").read_text())
    kinds = (stats.FOUND, stats.NONE, stats.OPEN, stats.UNMEASURED, "reference")
    assert verdicts and all(verdict.startswith(kinds) for verdict in verdicts)


@pytest.mark.slow
def test_the_answer_comes_last_and_the_output_is_short(demo):
    """120 lines for the whole loop, with the 5 evaluations that the full one has more."""
    lines = demo[1].splitlines()
    assert len(lines) + 5 < 120
    end = "\n".join(lines[-10:])
    answer = read_json(demo[0] / "report" / "report.json")["answer"]
    assert answer[0] in end and re.search("Mean gold score: .*Base .*", end)


@pytest.mark.slow
def test_run_folders_open_in_plain_transformers(demo):
    kinds = {"dpo": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        model, info = kind.from_pretrained(demo[0] / name, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert AutoTokenizer.from_pretrained(demo[0] / name).chat_template
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None


# ---- the full demo: what `make report` has written ----


def committed(kind):
    found = [read_json(path) for path in sorted(REPORTS.glob(f"{kind}-seed-?.json"))]
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
    gains, rates = [], []
    for report in committed("compare"):
        gains.append(utility(report, name) - utility(report, "base"))
        pairs = [row for row in report["comparisons"] if row.get("scorer", "gold") == "gold"]
        (pair,) = (row for row in pairs if called(row["a"], name) and called(row["b"], "base"))
        rates.append(pair.get("win_rate", pair.get("wins"))["value"])
        assert pair["verdict"] == "better" and model_of(report, name)["kl"]["low"] > 0
    assert sum(gains) / 3 >= gain and sum(rates) / 3 >= wins


def test_committed_reward_model_and_rubrics():
    """Reward model: accuracy ≥ .75 on unseen roles, ≥ .10 above "the longer answer wins".
    GRPO: .80 of the criteria of held-out prompts in the mean, .25 up in each."""
    for report in committed("reward"):
        accuracy = report["accuracy"]["value"]
        assert accuracy >= 0.75 and accuracy >= report["length_baseline"]["value"] + 0.10
    scores = [(r["test_before"]["score"], r["test_after"]["score"]) for r in committed("grpo")]
    assert all(after >= before + 0.25 for before, after in scores)
    assert sum(after for _, after in scores) / 3 >= 0.80


def test_committed_numbers_come_out_again():
    fresh = REPO / "runs" / "report-0" / "report" / "report.json"
    if not fresh.is_file():
        pytest.skip("`make report` has not run here")
    command = ["git", "show", "HEAD:reports/demo/compare-seed-0.json"]
    before = json.loads(subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout)
    for name, apart in (("base", 0.05), ("dpo", 0.05), ("ppo", 0.08)):
        now = utility(read_json(fresh), name)
        assert now == pytest.approx(utility(before, name), abs=apart), name
