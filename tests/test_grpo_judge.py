"""grpo_rubric.py with a judge behind HTTP that answers by a rule and fails as it is scripted to,
and with a reward model."""

import json
import re
import zlib
from itertools import islice

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import grpo_rubric
from judge_server import Rule, fault
from parts import sampling
from parts.files import write_json
from tiny import error_of, log_of, tiny_model, tiny_reward_model, write_rows

pytestmark = pytest.mark.usefixtures("quiet_process")


TEXT = "The answer holds a vowel."
VOWEL = re.compile("[aeiouAEIOU]")
CHECK = {"check": "regex:match", "pattern": "[aeiouAEIOU]"}


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


@pytest.fixture
def train(uniform, tmp_path):
    """(lines of the log, rollouts) of a run whose rows have these rubrics, or lie in `data`."""

    def run(server, *flags, rubrics=(TEXT,), sizes=(8, 2, 2), data=None, out="run", code=0):
        if not data:
            rows, data = iter(asks(sum(sizes), *rubrics)), tmp_path / "rows.json"
            splits = zip(("train", "validation", "test"), sizes)
            write_json(data, {split: [*islice(rows, n)] for split, n in splits})
        argv = f"""--model {uniform} --data {data} --judge-base-url {server.url} --out {tmp_path / out}
            --judge-model rule --judge-concurrency 8 --group-size 4 --groups-per-batch 4
            --steps 4 --max-new-tokens 1 --lr 3e-3 --schedule constant --patience 0 --eval-every 2
            --save-every 1 --restore last"""
        assert grpo_rubric.main([*argv.split(), *map(str, flags)]) == code
        return log_of(tmp_path / out), log_of(tmp_path / out, "rollouts")

    return run


def trained(rows):
    return [row for row in rows if "reward/mean" in row or "updates" in row]


def of_step(kept, row):
    return [r for r in kept if (r["step"], r["split"]) == (row["step"], "train")]


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def share_of(text, n):
    """True for one of n questions, always the same ones."""
    return zlib.crc32(text.encode("utf-8", "replace")) % n == 0


def assert_honest(kept, rule=vowel):
    for row in kept:
        truth = float(rule("", TEXT, row["answer"])) if row["answer"].strip() else 0.0
        assert row["reward"] in (None, truth), row
        assert (row["reward"] is None) == bool(row["rubric"]["error"])


BROKEN = 500, {"Retry-After": "0"}, "oops"  # a retry does not wait


def test_no_reward_is_invented_and_every_paid_reply_is_logged(train):
    with Rule(vowel, script=lambda text: BROKEN if share_of(text, 4) else None) as server:
        rows, kept = train(server, "--judge-max-retries", 1, "--judge-price", "1,1")
    assert_honest(kept)
    reasons = [r["rubric"]["criteria"][0]["reason"] for r in kept]
    assert reasons.count("by rule") > 40
    lost = []
    for row in trained(rows):
        group = of_step(kept, row)
        scored = [r["reward"] for r in group if r["reward"] is not None]
        lost.append(16 - len(scored))
        assert row["reward/lost/rubric"] == lost[-1]
        found = row["reward/unscored_frac"], row["reward/mean"]
        assert found == pytest.approx((lost[-1] / 16, sum(scored) / len(scored)), abs=1e-6)
        assert (row["judge/failed_frac"] > 0) == (lost[-1] > 0)
        assert all(r["advantage"] is None for r in group if r["reward"] is None)
    assert 4 < sum(lost) < 40
    paid = [row for row in rows if "judge/usd" in row]
    assert sum(row["judge/calls"] for row in paid) == len(server.paid) > 8
    assert sum(row["judge/usd"] for row in paid) == pytest.approx(1010e-6 * len(server.paid))


def test_a_dead_judge_ends_the_run(train, tmp_path):
    """It dies behind step 2. Two or three steps without a group to compare: exit status 4; the
    folder has the weights of step 2. --resume ends at once: every call fails."""
    flags = ("--steps", 9, "--eval-every", 9, "--judge-max-retries", 0, "--max-new-tokens", 4)
    with Rule(vowel) as server:
        train(server, *flags, "--stop-after", 2, out="two")
        n = len(server.asked)
        server.script = lambda text: BROKEN if len(server.asked) > 2 * n else None
        rows, kept = train(server, *flags, code=4)
        assert 3 < trained(rows)[-1]["step"] < 6
    assert not any("test/score" in row for row in rows)
    for row in trained(rows)[2:]:  # no update; no mean of nothing
        assert "loss" not in row and row["updates"] == 0 and row["judge/failed_frac"] > 0.9
    assert_honest(kept)
    two = weights(tmp_path / "two")
    assert all(torch.equal(weights(tmp_path / "run")[key], x) for key, x in two.items())


def test_a_spent_budget_buys_no_test(train):
    """A step asks at most 16 times, for 1010e-6 USD each: after step 2 a third is too dear."""
    with Rule(vowel) as server:
        rows, _ = train(server, *"--judge-price 1,1 --judge-budget 0.04 --eval-every 9".split())
    assert trained(rows)[-1]["step"] < 4 and not any("test/score" in row for row in rows)
    assert 1010e-6 * len(server.paid) < 0.04


def test_a_reference_reaches_the_judge_and_never_the_policy(train, tmp_path, monkeypatch):
    """Nor does a label under another name reach the judge; --gold reads it. What a program checks is
    not sent; validation, whose rows all have a check, asks nobody."""
    rows = asks(8, TEXT, CHECK, reference="Kafka is the gap.", label="SECRET")
    data, given, real = write_rows(tmp_path / "r.jsonl", rows), [], sampling.sample

    def sample(policy, tokenizer, prompts, *rest):
        given.extend(tokenizer.batch_decode(prompts))
        return real(policy, tokenizer, prompts, *rest)

    monkeypatch.setattr(sampling, "sample", sample)
    gold = gold_flag(tmp_path, "[len(row['label']) for row in rows]")
    with Rule(vowel, vowel_score) as server:
        flags = "--reward rubric --reward ruler --steps 2".split()
        rows, kept = train(server, *flags, *gold, data=data)
    assert {row["val/gold"] for row in rows if "val/gold" in row} == {6}
    assert not re.search("regex|aeiou|gold|check|pattern|SECRET", str(server.requests), re.I)
    for row in kept:
        criteria = (row.get("rubric") or row["checks"])["criteria"]
        kinds = {"judge", "check"} if row["split"] == "train" else {"check"}
        assert {c["kind"] for c in criteria} == kinds and len({c["verdict"] for c in criteria}) == 1
    assert {"<standard-" in text for text in server.asked} == {True, False}
    assert all("\nKafka is the gap.\n</reference-" in text for text in server.asked)
    assert str(given).count("Ask") > 8 and "Kafka" not in str(given)


def test_resume_repeats_no_paid_call(train, tmp_path):
    """A run that dies while grading step 3, resumed, asks only what was never answered, and ends
    with the weights and the answers of a run that never died, to the bit."""
    flags = ("--judge-concurrency", 1, "--save-every", 2, "--eval-every", 9)
    with Rule(vowel) as server:
        whole, _ = train(server, *flags, out="whole")
        dies = sum(row["judge/calls"] for row in whole if row["step"] <= 2) + 3
        once = list(server.paid)
        server.paid.clear()
        server.script = lambda text: fault(401) if len(server.paid) == dies else None
        assert "HTTP 401" in error_of(train, server, *flags)
        assert [row["step"] for row in trained(log_of(tmp_path / "run"))] == [1, 2]
        server.script = lambda text: None
        train(server, *flags, "--resume")
    assert sorted(server.paid) == sorted(once) and len({*once}) == len(once) > dies
    made = []
    for out in (tmp_path / "whole", tmp_path / "run"):
        # where a reply came from, and how long it took, differs
        log = [(r["step"], r["answer"], r["reward"]) for r in log_of(out, "rollouts")]
        made.append(((out / "model.safetensors").read_bytes(), log))
    assert made[0] == made[1]


def test_no_ruler_score_is_invented(train):
    """A group whose reply misses a label is void as a whole; all others have the rule's scores."""

    def script(text):
        if share_of(text, 4):
            labels = re.findall(r'<attempt-\w+ id="(\w+)">', text)
            return json.dumps({"scores": [{"id": k, "score": 0.5} for k in labels[1:]]})

    with Rule(vowel, vowel_score, script) as server:
        flags = "--reward", "ruler", "--judge-passes", 2
        rows, kept = train(server, *flags, rubrics=(TEXT, CHECK))
    assert all("<standard-" in text for text in server.asked)
    lost = 0
    for row in trained(rows):
        answers = of_step(kept, row)
        groups = [answers[i : i + 4] for i in range(0, 16, 4)]
        void = sum(group[0]["reward"] is None for group in groups)
        for group in groups:
            truth = [vowel_score(r["answer"]) if r["answer"].strip() else 0.0 for r in group]
            assert [r["reward"] for r in group] in ([None] * 4, truth, [0.0] * 4)
        for r in answers:  # with the judge's reason or why there is none
            assert r["ruler"]["score"] == r["reward"]
            assert r["reward"] is not None or "wanted once" in r["ruler"]["error"]
        assert row["groups/scored"] == 4 - void and row["judge/order_disagreement"] in (0.0, None)
        lost += void
    assert 1 < lost < 16


# ---- a reward model ----


def test_a_reward_model_scores_what_it_reads(uniform, tmp_path):
    """Refused where it could not read an answer to its end; one that is longer than it reads all the
    same has no reward."""
    folder = tiny_reward_model("llama", tmp_path, seed=5)
    record = {"stage": "reward_train", "args": {"max_length": 40}, "scale": [0.5, 2.0]}
    write_json(f"{folder}/args.json", record)
    rows = [{"prompt": f"Ask {i}. " * (20 if i < 3 else 1), "rubrics": [CHECK],
             "split": "train" if i < 6 else "val"} for i in range(8)]  # fmt: skip
    data, out = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run"
    argv = f"""--model {uniform} --data {data} --reward model --reward-model {folder} --out {out}
        --group-size 4 --groups-per-batch 2 --steps 1 --max-new-tokens""".split()
    assert "--max-new-tokens" in error_of(grpo_rubric.main, [*argv, "20"])
    assert grpo_rubric.main([*argv, "12"]) == 0
    train = [r["reward"] for r in log_of(out, "rollouts") if r["split"] == "train"]
    scored = [x for x in train if x is not None]  # bytes that are no text become three tokens each
    assert len({*scored}) > 2 and len(train) == 8
    row = next(row for row in log_of(out) if "reward/model" in row)
    assert row["reward/mean"] == pytest.approx(sum(scored) / len(scored), abs=1e-4)


# ---- a judge that can be fooled ----

PHRASE = re.compile(r"[0-9!-/:-@\[-`{-~]")  # punctuation, digits: what the flawed judge falls for


def flawed(answer):
    return 1.0 if PHRASE.search(answer) else 0.6 if VOWEL.search(answer) else 0.0


@pytest.mark.slow
def test_hybrid_stops_on_reward_hacking(train, tmp_path):
    flags = """--steps 120 --group-size 8 --groups-per-batch 8 --eval-every 4 --lr 2e-3 --restore best
        --reward ruler --eval-temperature 1""".split()
    more = dict(rubrics=(TEXT, CHECK), sizes=(28, 153, 11), code=3)
    with Rule(vowel, flawed) as server:
        rows, _ = train(server, *flags, **more)
    values = {row["step"]: row["val/score"] for row in rows if "val/score" in row}
    best, last = max(values, key=values.get), trained(rows)[-1]["step"]
    # the run ends as soon as R2 holds at three evaluations in a row
    assert best < last < 120 and values[last] < values[best] - 0.05
    rewards = [row["reward/mean"] for row in trained(rows)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.05
    assert weights(tmp_path / "run")
