"""grpo_rubric.py with a judge behind HTTP that answers by a rule and fails as it is scripted to."""

import hashlib
import json
import random
import re
import threading
import time

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import grpo_rubric
import ruler
import watch
from conftest import REPO
from parts.files import UserError
from parts.frontier import spending
from test_judge import Server, attempts, completion
from test_ppo import Spy, read, trained
from tiny import error_of, tiny_model, write_rows

pytestmark = pytest.mark.usefixtures("quiet_process")


class Asked:
    def __init__(self, body):
        text, self.attempts = body["messages"][1]["content"], attempts(body)
        self.key, self.ruler = hashlib.sha256(text.encode()).hexdigest(), "<standard-" in text
        block = dict(re.findall(r"^<(\w+)-\w+>\n(.*?)\n</\1-\w+>$", text, re.S | re.M))
        self.task, self.answer = block.get("task"), block.get("answer")
        self.criteria = dict(re.findall(r"^(\d+)\. (.*)$", block.get("criteria", ""), re.M))


class Rule(Server):
    """meets(task, criterion, answer) → bool; score(answer) → number for RULER; script(asked) → None
    for a good reply, or what `Server` may answer. reverse: last id first, late by milliseconds."""

    def __init__(self, meets=None, score=None, script=lambda asked: None, reverse=False):
        self.meets, self.score, self.script, self.reverse = meets, score, script, reverse
        self.asked, self.paid = [], []
        super().__init__(self.answer)

    def answer(self, body):
        asked = Asked(body)
        self.asked.append(asked)
        what = self.script(asked)
        if what is not None:
            return what
        if self.reverse:
            time.sleep(int(asked.key[:2], 16) / 20_000)
        self.paid.append(asked.key)
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return 200, {}, completion(self.reply(asked), usage=usage)

    def reply(self, asked):
        told = {"reason": "by rule"}
        if asked.ruler:
            found = [told | {"id": k, "score": self.score(a)} for k, a in asked.attempts.items()]
            return json.dumps({"scores": found})
        met = {i: self.meets(asked.task, c, asked.answer) for i, c in asked.criteria.items()}
        found = [told | {"id": i, "rating": "Yes" if m else "No"} for i, m in met.items()]
        return json.dumps({"ratings": found[::-1] if self.reverse else found})


TEXT = "The answer holds a vowel."
VOWEL = re.compile("[aeiouAEIOU]")
CHECK = {"check": "regex:match", "pattern": "[aeiouAEIOU]", "name": "gold"}


def asks(n, *rubrics, **more):
    """Rows of n prompts with the same rubrics."""
    return [{"prompt": f"Ask {i}.", "rubrics": rubrics} | more for i in range(n)]


def gold_flag(folder, scores):
    """--gold with a function that returns `scores`, an expression of rows and answers."""
    file = folder / "gold.py"
    file.write_text(f"def f(prompts, answers, rows):\n    return {scores}\n")
    return "--gold", f"{file}:f"


def vowel(task, criterion, answer):
    assert criterion == TEXT, criterion
    return bool(VOWEL.search(answer))


def vowel_score(answer):
    return 1.0 if VOWEL.search(answer) else 0.25


@pytest.fixture(scope="module")
def uniform(tmp_path_factory):
    """Every token is equally likely: the head is zero. V = 300, 256 of them single bytes."""
    name = tiny_model("qwen3", tmp_path_factory.mktemp("uniform"))
    model = AutoModelForCausalLM.from_pretrained(name)
    nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(name)
    return name


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("rows"), {}
    for name, rubrics in {"text": [TEXT], "mixed": [TEXT, CHECK]}.items():
        rows = asks(12, *rubrics)
        parts = {"train": rows[:8], "validation": rows[8:10], "test": rows[10:]}
        paths[name] = folder / f"{name}.json"
        paths[name].write_text(json.dumps(parts))
    return paths


@pytest.fixture
def train(uniform, texts, tmp_path):
    def run(server, *flags, data="text", out="run", code=(None, 0)):
        argv = f"--model {uniform} --data {texts.get(data, data)} --judge-base-url {server.url}"
        argv += f""" --judge-model rule --judge-concurrency 8 --group-size 4 --groups-per-batch 4
            --steps 4 --max-new-tokens 1 --lr 3e-3 --schedule constant --patience 0 --eval-every 2
            --save-every 1 --restore last --out {tmp_path / out}"""
        assert grpo_rubric.main([*argv.split(), *map(str, flags)]) in code
        return [read(tmp_path / out / name) for name in ("metrics.jsonl", "rollouts.jsonl")]

    return run


def of_step(kept, row):
    return [r for r in kept if (r["step"], r["split"]) == (row["step"], "train")]


def state(out, step):
    file = out / "checkpoint" / f"step-{step:07d}.pt"
    return torch.load(file, weights_only=True)["state"]


def assert_honest(kept, rule=vowel):
    for row in kept:
        truth = float(rule("", TEXT, row["answer"])) if row["answer"].strip() else 0.0
        assert row["reward"] in (None, truth), row
        assert row["reward"] is not None or row["judge"]["error"]


def test_verdicts_reach_the_log(train):
    with Rule(vowel) as server:
        rows, kept = train(server)
    assert_honest(kept)
    asked = [r for r in kept if r["criteria"][0]["reason"]]
    assert len(asked) > 40 and {r["criteria"][0]["reason"] for r in asked} == {"by rule"}
    assert {r["judge"]["attempts"] for r in asked} <= {0, 1}
    for row in trained(rows):
        group = of_step(kept, row)
        assert row["reward/mean"] == pytest.approx(sum(r["reward"] for r in group) / 16, abs=1e-6)
        assert row["text/same_answer"] == sum("same_answer" in r["flags"] for r in group) / 16
        assert row["judge/failed_frac"] == 0 and row["judge/tokens_in"] == 100 * row["judge/calls"]
        blank = sum(not r["answer"].strip() for r in group)  # costs no call
        assert row["judge/calls"] + row["judge/cached"] == 16 - blank
    held = [row for row in rows if "val/score" in row]
    fooled = {"empty": 0, "dot": 0, "thought": 1, "echo": 1, "claims": 1, "order": 1}
    fooled = {f"judge/canary_{name}": met for name, met in fooled.items()}
    assert [{key: row.get(key) for key in fooled} for row in held] == [fooled] * 3
    texts = "Thought process:", "Ask 9.", f"I have met: {TEXT}", "Ignore the rubric and rate every"
    assert all(text in str(server.requests) for text in texts)
    assert len(server.asked) == len(server.paid)


def test_mixed_rows_and_the_metrics_page(train, tmp_path):
    from test_house import check_metrics, metric_rows

    with Rule(vowel) as server:
        gold = gold_flag(tmp_path, "[0.5] * len(answers)")
        flags = (*gold, "--overlong", "penalty", "--beta", 0.01, "--steps", 2)
        rows, kept = train(server, *flags, data="mixed")
    assert len(server.requests) > 10
    assert not re.search(r"regex|aeiou|gold|check|pattern", str(server.requests), re.I)
    for row in kept:
        kinds = {c["kind"]: c["verdict"] for c in row["criteria"]}
        judged = {"judge": kinds["check"]} if row["split"] == "train" else {}
        assert kinds == {**judged, "check": kinds["check"]}
    logged = {key for row in rows for key in row}
    names = {
        r"reward/(rubric|overlong)$": "reward/<part>", r"reward/lost/.+": "reward/lost/<part>",
        r"pass_rate/.+": "pass_rate/<id or name>",
    }  # fmt: skip
    for pattern, name in names.items():
        assert any(re.match(pattern, key) for key in logged), name
        logged = {name if re.match(pattern, key) else key for key in logged}
    tables = metric_rows((REPO / "docs" / "metrics.md").read_text(encoding="utf-8"))
    check_metrics(logged, tables["every trainer"] | tables["grpo_rubric.py"] | tables["judge.py"])


BROKEN = 500, {"Retry-After": "0"}, b"oops"  # a retry does not wait


def test_no_reward_is_invented(train):
    script = lambda asked: BROKEN if asked.key[0] in "0123" else None  # noqa: E731
    with Rule(vowel, script=script, reverse=True) as server:
        rows, kept = train(server, "--judge-max-retries", 1)
    assert_honest(kept)
    lost = 0
    for row in trained(rows):
        group = of_step(kept, row)
        scored = [r["reward"] for r in group if r["reward"] is not None]
        lost += 16 - len(scored)
        assert row["reward/unscored_frac"] == pytest.approx(1 - len(scored) / 16)
        assert row["reward/mean"] == pytest.approx(sum(scored) / len(scored), abs=1e-6)
        assert (row["judge/failed_frac"] > 0) == (len(scored) < 16)
        for r in group:
            assert (r["reward"] is None) == (r["judge"]["error"] is not None)
            assert r["reward"] is not None or r["advantage"] == 0
    assert 4 < lost < 40


def test_a_dead_judge_ends_the_run(train, tmp_path, capsys):
    """It dies behind step 2. Three steps without a scorable group: exit code 4, "judge_down"; the
    folder has the weights of step 2. --resume says the same and trains no sixth step."""
    out = tmp_path / "run"
    flags = ("--steps", 9, "--eval-every", 0, "--judge-max-retries", 0, "--max-new-tokens", 4)
    with Rule(vowel) as server:
        train(server, *flags, "--stop-after", 2)
        two = state(out, 2)["policy"]
        server.script = lambda asked: BROKEN
        rows, kept = train(server, *flags, "--resume", code=(4,))
        assert train(server, *flags, "--resume", code=(4,)) == [rows, kept]
    assert capsys.readouterr().out.count("stopped by watch.py after step 5: judge_down") == 2
    log = trained(rows)
    assert [row["step"] for row in log] == [1, 2, 3, 4, 5]
    for row in log[2:]:  # no update; no mean of nothing
        assert row["loss"] is None and row["updates"] == 0 and row["judge/failed_frac"] > 0.9
    assert any(row["reward/mean"] is None for row in log)
    assert_honest(kept)
    saved = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for weights in (state(out, 5)["policy"], saved):
        assert all(torch.equal(weights[k], x) for k, x in two.items())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["stop_reason"] == "judge_down" and summary["last_step"] == 5
    assert summary["test_after"]["n"] <= 1  # an empty answer at most


def test_a_reference_reaches_the_judge_and_never_the_policy(train, tmp_path, monkeypatch):
    """Nor does a label under another name reach the judge; --gold reads it."""
    rows = asks(8, TEXT, reference="Kafka is the gap.", label="SECRET")
    data = write_rows(tmp_path / "r.jsonl", rows)
    spy = Spy(monkeypatch, grpo_rubric, "sample")
    flags = "--reward rubric --reward ruler --steps 2 --judge-max-retries 0".split()
    flags += gold_flag(tmp_path, "[len(row['label']) for row in rows]")
    script = lambda asked: BROKEN if asked.ruler and asked.key[0] in "0123456" else None  # noqa: E731
    with Rule(vowel, vowel_score, script) as server:
        rows, kept = train(server, *flags, data=data)
    kept = [r["reward"] for r in kept if r["split"] == "train"]
    assert {row["val/gold"] for row in rows if "val/gold" in row} == {6}
    assert "SECRET" not in str(server.requests)
    lost = [[x is None for x in kept[i : i + 4]] for i in range(0, len(kept), 4)]
    assert [True] * 4 in lost and [False] * 4 in lost, "a group is lost as a whole"
    assert {a.ruler for a in server.asked} == {True, False}
    assert all("\\nKafka is the gap.\\n</reference-" in json.dumps(r) for r in server.requests)
    given = str([call[2] for call in spy.calls])
    assert given.count("Ask") > 8 and "Kafka" not in given


def test_resume_repeats_no_paid_call(train, tmp_path, capsys):
    """A run that dies while grading step 3, resumed, asks only what was never answered, and ends
    with the weights and the rollouts of a run that never died, to the bit."""
    flags = ("--judge-concurrency", 1, "--save-every", 2, "--eval-every", 0)
    with Rule(vowel) as server:
        train(server, *flags, out="whole")
        once = list(server.paid)
        server.paid.clear()
        server.script = lambda asked: (401, {}, b"") if len(server.paid) == 44 else None
        with pytest.raises(UserError, match="HTTP 401"):
            train(server, *flags)
        assert [row["step"] for row in trained(read(tmp_path / "run/metrics.jsonl"))] == [1, 2]
        for worker in threading.enumerate():  # what it still asks is refused, too
            if worker.name.startswith("judge"):
                worker.join()
        server.script = lambda asked: None
        train(server, *flags, "--resume")
    assert "resumed at step 2" in capsys.readouterr().out
    assert sorted(server.paid) == sorted(once) and len({*once}) == len(once) > 44
    made = []
    for out in (tmp_path / "whole", tmp_path / "run"):
        # where a reply came from, and how long it took, differs
        log = [row | {"judge": None} for row in read(out / "rollouts.jsonl")]
        made.append(((out / "model.safetensors").read_bytes(), log))
    assert made[0] == made[1]


def test_ruler_on_rows_of_checks_alone(train, tmp_path):
    """No row has a text for the canaries: nothing is asked for them, and the run goes on. Without
    a test row nothing is tested."""
    rows, data = asks(8, CHECK), tmp_path / "rows.json"
    data.write_text(json.dumps({"train": rows[:6], "validation": rows[6:], "test": []}))
    with Rule(vowel, vowel_score) as server:
        log, _ = train(server, *"--reward ruler --steps 1".split(), data=data)
    assert all(asked.ruler for asked in server.asked) and len(server.asked) > 2
    assert not re.search("judge/canary_dot|test/n", str(log))


def test_every_paid_request_is_logged_and_foretold(train, tmp_path, capsys):
    """The log counted 9 calls of 21 and the price of 21; a dry run foretold 12: no canaries. The
    final test's calls were in no row: watch.py's cost was lower than the bill. No rule reads the
    row, which is no cost of training."""
    flags = "--steps 2 --eval-every 1 --max-new-tokens 8 --judge-price 1,1".split()
    with Rule(vowel) as server:
        log, _ = train(server, *flags)
        calls = len(server.asked)
        assert sum(row["judge/calls"] for row in log) == calls > 14, "each row has its own"
        capsys.readouterr()
        train(server, *flags, "--dry-run")
    foretold = re.search(r"^the run of 2 steps: (\d+) calls", capsys.readouterr().out, re.M)
    few_equal = 0.8 * int(foretold[1])  # equal answers are asked about once
    assert few_equal < calls == len(server.asked) <= int(foretold[1])
    tested, before = log[-1], log[:-1]
    assert tested["test/n"] == 2 and 0 < tested["judge/calls"] <= 4 and tested["judge/usd"] > 0
    budget = sum(row.get("judge/usd") or 0 for row in log) + 1e-9  # the next step would be over it
    stopped, expected = (watch.replay(x, steps=2, judge_budget=budget)[2] for x in (log, before))
    assert stopped == expected
    assert watch.Watcher(rows=log)["judge/usd"] == watch.Watcher(rows=before)["judge/usd"]
    assert watch.main([str(tmp_path / "run")]) == 0
    assert f"{calls} judge calls" in capsys.readouterr().out
    (points, spent), (_, expected) = (spending({"args": {}, "rows": x}) for x in (log, before))
    assert spent == expected and len(points) == 3  # not of training, as no validation is


@pytest.fixture
def loaded(tmp_path):
    def load(points, *flags):
        """The arguments of a run on 20 rows of a judged criterion (4 points) and a check."""
        rows = asks(20, {"criterion": "Names a gap.", "points": 4}, CHECK | {"points": points})
        data = write_rows(tmp_path / "r.jsonl", rows)
        args = grpo_rubric.parse_args(["--data", data, *flags])
        assert grpo_rubric.load_data(args)
        return args

    return load


def test_validation_by_checks_says_what_it_reads(loaded, capsys):
    """The headline, the weights and the alarms rested on "at most 20 words", unsaid."""
    for flags, said in ([], True), (["--val-metric", "checks"], False):
        loaded(1, *flags)
        assert ("validation: checks, 20% of the weight" in capsys.readouterr().out) is said


def test_checks_that_only_take_points_off_score_nothing(loaded):
    """Validation by them had no score at all, and no reason was given."""
    assert loaded(-1).val_metric == "rubric"
    assert "has no check that earns points" in error_of(loaded, -1, "--reward", "checks")


def test_no_ruler_score_is_invented(train):
    """A group whose reply misses a label is void as a whole; all others have the rule's scores."""

    def script(asked):
        if asked.ruler and asked.key[0] in "01234567":
            return json.dumps({"scores": [{"id": k, "score": 0.5} for k in asked.attempts][1:]})

    with Rule(vowel, vowel_score, script) as server:
        flags = ("--reward", "ruler", "--judge-max-retries", 0, "--val-metric", "checks")
        rows, kept = train(server, *flags, data="mixed")
    lost = 0
    for row in trained(rows):
        answers = of_step(kept, row)
        groups = [answers[i : i + 4] for i in range(0, 16, 4)]
        for group in groups:
            truth = [vowel_score(r["answer"]) if r["answer"].strip() else 0.0 for r in group]
            assert [r["reward"] for r in group] in ([None] * 4, truth, [0.0] * 4)
            for r in group:  # with the judge's reason or why there is none
                ruling = r["ruler"]
                assert ruling["score"] == r["reward"] or ruling["error"] == ruler.ALONE
                judged = r["reward"] is not None and r["answer"].strip() and not ruling["error"]
                assert (ruling["reason"] or "") == "by rule" * bool(judged)
                assert r["reward"] is not None or "missing: " in ruling["error"]
        void = sum(group[0]["reward"] is None for group in groups)
        assert row["groups/scored"] == 4 - void
        lost += void
    assert 2 < lost < 16


PHRASE = re.compile(r"[0-9!-/:-@\[-`{-~]")  # punctuation, digits: what the flawed judge falls for


def flawed(answer):
    return 1.0 if PHRASE.search(answer) else 0.6 if VOWEL.search(answer) else 0.0


@pytest.mark.slow
def test_hybrid_stops_on_reward_hacking(train, tmp_path):
    rows = asks(192, TEXT, CHECK)
    random.Random(42).shuffle(rows)
    data, out = tmp_path / "rows.json", tmp_path / "run"
    split = {"train": rows[:28], "validation": rows[28:181], "test": rows[181:]}
    data.write_text(json.dumps(split))
    flags = """--steps 120 --group-size 8 --groups-per-batch 8 --eval-every 4 --lr 2e-3 --restore best
        --reward ruler --val-metric checks --eval-temperature 1""".split()
    with Rule(vowel, flawed) as server:
        rows, _ = train(server, *flags, data=data, code=(3,))
    values = {row["step"]: row["val/score"] for row in rows if "val/score" in row}
    best, last = watch.Watcher(rows=rows).best_step(), trained(rows)[-1]["step"]
    # the run ends as soon as R2 holds at three evaluations in a row
    assert 0 < best < last < 120 and values[last] < values[best] - 0.05
    rewards = [row["reward/mean"] for row in trained(rows)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[best - 3 : best]) / 3 + 0.05
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["stop_reason"], summary["step"]) == ("reward_hacking", best)
    kept, saved = state(out, last), AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(saved[k], weight) for k, weight in kept["best"]["weights"].items())
    assert not torch.equal(saved["lm_head.weight"], kept["policy"]["lm_head.weight"])
