"""A real inference server as the judge: judge.py, ruler.py and grpo_rubric.py against a model that
knows nothing of judging, whose every reply can be read all the same, for the server enforces its form.

`make real-server URL=http://localhost:8000/v1` runs them, with any OpenAI-compatible server that
takes a JSON schema (vLLM, llama.cpp, Ollama). What it is worth as a judge, `judge.py audit` says.
"""

import json
import os
import re

import pytest

import grpo_rubric
import judge
import ruler
from case_rows import rows_of
from parts.files import read_jsonl
from tiny import tiny_model, write_rows

URL = os.environ.get("FEEDBACKLOOP_JUDGE_URL")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not URL, reason="FEEDBACKLOOP_JUDGE_URL names no server: make real-server"),
]
SERVER = ["--judge-base-url", URL or "", "--judge-timeout", "600", "--judge-max-tokens", "400",
          "--judge-model", os.environ.get("FEEDBACKLOOP_JUDGE_MODEL", "policy")]  # fmt: skip


@pytest.fixture(scope="module")
def rubrics(tmp_path_factory):
    """Forty answers of which it is known whether they name a strength: every second one does."""
    return write_rows(
        tmp_path_factory.mktemp("rated") / "rated.jsonl", rows_of("judging", of="real")
    )


def scores(path):
    return [row["score"] for row in read_jsonl(path)]


def test_audit_reads_every_reply(rubrics, tmp_path, capsys):
    out = tmp_path / "audit.jsonl"
    assert judge.main(["audit", "--data", rubrics, "--out", str(out), *SERVER]) == 0
    assert None not in scores(out) and len(scores(out)) == 40
    print(said := capsys.readouterr().out)
    assert re.search(
        r"judge: 40 ratings; without a verdict: 0\n  agrees with people: [01]\.\d+ \[", said
    )


def test_grade_and_ruler_read_every_reply(rubrics, tmp_path):
    rows = [*read_jsonl(rubrics)][:2]
    answers = [{"prompt": x["prompt"], "response": y["response"]} for x in rows for y in rows]
    write_rows(tmp_path / "answers.jsonl", answers)
    given = ["--responses", str(tmp_path / "answers.jsonl"), *SERVER, "--out"]
    assert judge.main(["grade", "--data", rubrics, *given, str(tmp_path / "grades.jsonl")]) == 0
    assert ruler.main([*given, str(tmp_path / "ruler.jsonl")]) == 0
    assert {*scores(tmp_path / "grades.jsonl")} <= {0.0, 1.0}
    assert all(0 <= score <= 1 for score in scores(tmp_path / "ruler.jsonl"))


def test_three_steps_of_grpo(rubrics, tmp_path):
    """Every answer that is not blank has a verdict."""
    argv = f"""--model {tiny_model("qwen3", tmp_path)} --data {rubrics} --train-ratio .9 --steps 3
        --group-size 2 --groups-per-batch 2 --max-new-tokens 4 --eval-every 9 --out {tmp_path}/run"""
    assert grpo_rubric.main([*argv.split(), *SERVER]) == 0
    kept = list(read_jsonl(tmp_path / "run" / "rollouts.jsonl"))
    assert kept and all(row["rubric"]["error"] is None for row in kept), json.dumps(kept)[:1000]
