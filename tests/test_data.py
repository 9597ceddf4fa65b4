"""The bundled data and base. The bytes of every file are held, by the generator or by the hash on the
card; what the card says of their content was tested at commit 6b456b2 and cannot change alone.

recruiter.jsonl   moves: two answers that differ in one component of the recruiter's utility; worth: golden
                  values (.575: python shown, sql and linux claimed, 3 of 6 years: .6·1/2 + .15·1 + .1·1/2 +
                  .15·1/2; .3: the gate)
"""

import hashlib
import os
import random
import re
import statistics
import subprocess
import sys

import pytest

import grammar
import make_data
import recruiter
from case_rows import each
from conftest import REPO
from parts.files import read_jsonl

DATA = REPO / "data"


def content(row, *keys):
    return [row[key][0]["content"] for key in keys]


def bundled(name):
    return [*read_jsonl(DATA / f"{name}.jsonl")]


def test_the_files_are_what_the_generator_writes(tmp_path):
    command = [sys.executable, DATA / "make_data.py", "--out", tmp_path]
    subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "4711"}, check=True)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(written) == 16
    assert [name for name in written if written[name] != (DATA / name).read_bytes()] == []


# an answer that names skills, in the form of its task
NAMING = {
    "assess": "Strengths: {}.\nGaps: none.\nRecommendation: hold.",
    "interview": "How have you used {}?",
    "summary": "Skills: {}.\nTeamwork: not discussed.\nConcerns: none.",
}


@each("recruiter", of="moves")
def test_each_component_moves_alone(prompt, component, better, worse):
    """The named one falls, all others stay, and the utility falls by weight × difference. (`no
    invention`: recall stays at 1/2 = 2/(2 + 2·1) and 1/3 = 3/(3 + 2·3): an invention counts twice
    below.)"""
    high, low = (recruiter.components(prompt, text) for text in (better, worse))
    assert [name for name in high if high[name] != low[name]] == [component]
    weight, value = high[component]
    assert value > low[component][1] and sum(w for w, _ in high.values()) == pytest.approx(1)
    gap = recruiter.utility(prompt, better) - recruiter.utility(prompt, worse)
    assert gap == pytest.approx(weight * (value - low[component][1]), abs=2e-6)


@each("recruiter", of="worth")
def test_goldens_of_the_recruiter(prompt, answer, worth):
    messages = make_data.message("user", prompt), make_data.message("assistant", answer)
    found = recruiter.utility(prompt, answer), *recruiter.reward([messages[0]], [messages[1]], None)
    assert found == pytest.approx((worth, worth))


@pytest.mark.parametrize("task", grammar.TASKS)
def test_the_best_answer_is_worth_one_and_cheats_do_not_pay(task):
    """Of 300 cases: what the recruiter reads is the truth; the answers that name every skill, repeat
    the prompt or themselves, or talk on are worth less than the usual one of prefs_train."""
    rngs = [random.Random(f"test_data/{task}/{i}") for i in range(300)]
    people = [grammar.make_case(rng, task, "test") for rng in rngs]
    prompts = [*map(grammar.prompt, people)]
    best = [*map(grammar.answer, rngs, people)]
    for prompt, case in zip(prompts, people):
        truth = recruiter.read(prompt)
        read = truth.shown, truth.gaps, truth.teamwork, truth.concerns, sorted(truth.claimed)
        told = case["shown"], grammar.gaps(case), case["teamwork"], case["concerns"]
        assert read == (*told, sorted(case["claimed"]))

    def mean(answers):
        return statistics.fmean(recruiter.reward(prompts, answers))

    naming = NAMING[task].format
    assert mean(best) == 1
    assert max(mean([text] * 300) for text in [*best[:60], naming("sql")]) <= 0.45
    rows = [row for row in bundled("prefs_train") if row["task"] == task]
    texts = [content(row, "prompt", side) for row in rows for side in ("chosen", "rejected")]
    usual = statistics.fmean(recruiter.utility(*pair) for pair in texts)
    assert 0.4 < usual < 0.6
    musts = [naming(", ".join(case["must"])) for case in people]
    again = [f"{text}\n{text.splitlines()[-1]}" for text in best]
    assert max(map(mean, (musts, prompts, again, [text + " word" * 121 for text in best]))) < usual


def test_names_enter_nothing():
    """The truth must be blind, or the audits measure the recruiter."""
    for row in (bundled("prefs_train") + bundled("rank_train"))[::4]:
        prompt, *answers = texts = content(row, "prompt", "chosen", "rejected")
        for entry in row["candidates"]:
            texts = [text.replace(entry["name"], "Jamal Mack") for text in texts]
        after = recruiter.reward([texts[0]] * 2, texts[1:])
        assert after == recruiter.reward([prompt] * 2, answers)


CARD = (DATA / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name, sha", re.findall(r"^\| `(\S+)` \|.* `(\w{16})` \|$", CARD, re.M))
def test_hashes_of_the_card(name, sha):
    """The statistics on the card were measured on the files with these hashes."""
    assert hashlib.sha256((DATA / name).read_bytes()).hexdigest()[:16] == sha
